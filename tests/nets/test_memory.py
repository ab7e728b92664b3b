"""Where the memory goes: what is held from forward to backward, and that it is let go."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import retrograde as rg
from problems import Mlp, conv
from retrograde.stack.momentum import Momentum


class Live(TorchDispatchMode):
    """Counts the bytes of every storage made inside and still alive; those of the given tensors are not new."""

    def __init__(self, net: nn.Module, x: torch.Tensor) -> None:
        super().__init__()
        self.storages = WeakIdKeyDictionary()
        self.known = {t.untyped_storage().data_ptr() for t in (x, *net.parameters(), *net.buffers())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.storages[t.untyped_storage()] = t.untyped_storage().nbytes()
        return out

    def bytes(self, at_least: int = 0) -> int:
        return sum(n for n in self.storages.values() if n >= at_least)


def held(net: rg.MomentumNet, x: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Bytes per element of x held between forward and backward, and the loss that holds them (output left out)."""
    with torch.no_grad():
        net(x)  # calibrate
    with Live(net, x) as live:
        y = net(x)
        loss = y.sum()
        del y
        gc.collect()
        return live.bytes(at_least=x.numel()) / x.numel(), loss


@pytest.mark.parametrize(
    ("depth", "buffer"), [(1, 1), (16, 1), (17, 2), (61, 2), (62, 3), (166, 4), (167, 4 + 1), (400, 11)]
)
def test_bytes_held_are_the_state_whatever_the_depth(depth: int, buffer: int) -> None:
    net = rg.MomentumNet([Mlp(16, 16)] * depth, gamma=0.9, memory="reverse")
    x = torch.randn(512, 16)
    assert held(net, x)[0] == 4 + 4 + buffer


def test_slope_over_depth() -> None:
    """Reverse: the buffers' bits alone. Store: every activation, so the same test fails for it."""
    slopes = {}
    for memory in ("reverse", "checkpoint", "store"):
        per_depth = [
            held(rg.MomentumNet([Mlp(16, 16)] * k, gamma=0.9, memory=memory), torch.randn(512, 16))[0] for k in (20, 60)
        ]
        slopes[memory] = (per_depth[1] - per_depth[0]) / 40
    assert slopes["reverse"] == 0
    assert slopes["checkpoint"] == 4
    assert slopes["store"] >= 8


def test_float64_and_bfloat16_state() -> None:
    x = torch.randn(512, 16)
    for dtype, expected in ((torch.float64, 8 + 8 + 2), (torch.bfloat16, 4 + 4 + 2)):
        net = rg.MomentumNet([Mlp(16, 16).to(dtype)] * 20, gamma=0.9, memory="reverse")
        assert held(net, x.to(dtype))[0] == expected


def test_auto_takes_the_cheaper() -> None:
    for dtype, depth, expected in (
        (torch.bfloat16, 3, 6),
        (torch.bfloat16, 9, 9),
        (torch.float32, 2, 8),
        (torch.float32, 4, 16),  # a reversal has up to three more activations at hand, the other one: 21 against 20
        (torch.float32, 5, 9),
    ):
        net = rg.MomentumNet([Mlp(16, 16).to(dtype)] * depth, gamma=0.9, memory="auto")
        assert held(net, torch.randn(512, 16, dtype=dtype))[0] == expected


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
def test_nothing_is_left_after_backward_or_when_the_loss_is_dropped(memory: str) -> None:
    net = rg.MomentumNet([conv(8) for _ in range(5)], memory=memory)
    x = torch.randn(8, 8, 6, 6)
    net(x).sum().backward()
    for use in (lambda y: y.sum().backward(), lambda y: None):
        with Live(net, x) as live:
            y = net(x)
            use(y)
            for p in net.parameters():
                p.grad = None
            del y
            assert live.bytes(at_least=x.numel()) == 0


def test_the_tape_is_freed_the_moment_it_has_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """While block 0 still computes its gradients, x and v are gone."""
    states: list[weakref.ref[Momentum]] = []
    made = Momentum.__init__

    def remember(self: Momentum, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        states.append(weakref.ref(self))

    net = rg.MomentumNet([Mlp() for _ in range(4)], memory="reverse", fraction_bits=22)
    monkeypatch.setattr(Momentum, "__init__", remember)
    seen = []
    net.blocks[0].inner.weight.register_hook(lambda g: seen.append(hasattr(states[-1](), "x")))
    net.blocks[1].inner.weight.register_hook(lambda g: seen.append(hasattr(states[-1](), "x")))
    net(torch.randn(3, 8)).sum().backward()
    assert seen == [True, False]


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
def test_gradients_at_hand_are_one_array_fewer_in_the_last_block(form: str, memory: str) -> None:
    net = rg.MomentumNet([Mlp(16, 16) for _ in range(4)], form=form, memory=memory, fraction_bits=20)
    x, seen = torch.randn(512, 16, requires_grad=True), dict[int, float]()

    def gradients(module: nn.Module, k: int) -> None:
        module.inner.weight.register_hook(lambda g: seen.__setitem__(k, live.bytes(at_least=4 * x.numel()) / x.numel()))

    for k, block in enumerate(net.blocks):
        gradients(block, k)
    loss = net(x).sum()
    with Live(net, x) as live:
        loss.backward()
    assert seen[1] == seen[2]
    assert seen[3] == seen[2] - 4


@pytest.mark.parametrize("verify", ["off", "end", "blocks"])
def test_no_leak_over_many_steps(verify: str) -> None:
    net = rg.MomentumNet([Mlp() for _ in range(4)], memory="reverse", verify=verify)
    x = torch.randn(64, 8)

    def step() -> None:
        net(x).sum().backward()
        for p in net.parameters():
            p.grad = None

    for _ in range(3):
        step()
    gc.disable()  # nothing may rely on the cycle collector
    try:
        with Live(net, x) as live:
            for _ in range(50):
                step()
            assert live.bytes(at_least=x.numel()) == 0
    finally:
        gc.enable()


def test_peak_of_a_step_does_not_grow_with_depth() -> None:
    peaks: dict[int, int] = {}
    for depth in (10, 40):
        net = rg.MomentumNet([Mlp(32, 32)] * depth, gamma=0.99, memory="reverse")
        x = torch.randn(256, 32)
        net(x).sum().backward()
        peaks[depth] = peak(net, x)
    assert peaks[40] <= peaks[10] * 1.1


def peak(net: rg.MomentumNet, x: torch.Tensor) -> int:
    largest = 0

    class Watch(Live):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = super().__torch_dispatch__(func, types, args, kwargs)
            largest = max(largest, self.bytes(at_least=4096))
            return out

    with Watch(net, x):
        net(x).sum().backward()
    return largest


def test_module_holds_no_pass(tmp_path) -> None:
    net = rg.MomentumNet([nn.Linear(256, 256) for _ in range(3)])
    y = net(torch.randn(4096, 256))
    torch.save(net, tmp_path / "net.pt")
    assert (tmp_path / "net.pt").stat().st_size < 1_000_000
    y.sum().backward()
