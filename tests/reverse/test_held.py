"""Where the memory goes: what is held from forward to backward, and that it is let go."""

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import retrograde as rg
from problems import Mlp, conv
from retrograde.memory.peak import peak_memory
from retrograde.reverse.extra import Extra
from retrograde.reverse.forward import Pass
from retrograde.reverse.momentum import Momentum
from ways import begun

FIXED = rg.FixedPoint(20, torch.int32)


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


def test_the_tape_is_freed_the_moment_it_has_served() -> None:
    """While block 0 still computes its gradients, x and v are gone."""
    net, x, seen = rg.MomentumNet([Mlp() for _ in range(4)], memory="reverse"), torch.randn(3, 8), []
    state = Momentum(x, net.recurrence, begun(net, x), reversible=True)
    run = Pass(state, x, 4, reversed=4, verify="auto")
    for block in net.blocks:
        run.step(block, Extra((), {}))
    for block in list(net.blocks)[:2]:
        block.inner.weight.register_hook(lambda g: seen.append(hasattr(state, "x")))
    run.finish().sum().backward()
    assert seen == [True, False]


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
def test_gradients_at_hand_are_one_array_fewer_in_the_last_block(form: str, memory: str) -> None:
    net = rg.MomentumNet([Mlp(16, 16) for _ in range(4)], form=form, memory=memory, fixed_point=FIXED)
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


@pytest.mark.parametrize("verify", ["off", "auto", "strict"])
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


@pytest.mark.parametrize(
    ("dtype", "fixed_point", "each"),
    [
        (torch.float32, "int16", 2), (torch.float32, "auto", 4), (torch.float64, "auto", 8), (torch.bfloat16, "int16", 2),
        (torch.float16, "auto", 2),
    ],
)  # fmt: skip
def test_kept_inputs_are_integers_where_these_are_narrower(dtype: torch.dtype, fixed_point: str, each: int) -> None:
    sizes, x = [], torch.randn(512, 16, dtype=dtype)
    for depth in (8, 24):
        net = rg.MomentumNet([Mlp(16, 16) for _ in range(depth)], memory="checkpoint", fixed_point=fixed_point).to(
            dtype
        )
        sizes.append(held(net, x)[0])
    assert sizes[1] - sizes[0] == 16 * each
    for block in list(net.blocks)[:12]:
        block.requires_grad_(False)  # keeps nothing
    assert held(net, x)[0] == sizes[1] - 12 * each


def test_an_input_that_others_change_is_found_again_or_refused() -> None:
    """As a float it is the block's own, and the change is an error; the integers are a copy."""

    def gradients(fixed_point: str, change: bool) -> list[torch.Tensor]:
        inputs: list[torch.Tensor] = []
        torch.manual_seed(0)
        net = rg.MomentumNet([Mlp() for _ in range(4)], memory="checkpoint", fixed_point=fixed_point)
        net.blocks[2].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        y = net(torch.ones(3, 8)).sum()
        if change:
            inputs[0].detach().zero_()
        return list(torch.autograd.grad(y, list(net.parameters())))

    assert all(map(torch.equal, gradients("int16", change=False), gradients("int16", change=True)))
    with pytest.raises(rg.ReplayError, match="the input of block 2, kept for its backward pass, was changed"):
        gradients("auto", change=True)
    x = torch.randn(3, 8)
    y = rg.MomentumNet([Mlp(), Mlp()], gamma=0, memory="checkpoint")(x)
    x.mul_(3)
    with pytest.raises(rg.ReplayError, match="input of block 0, kept"):
        y.sum().backward()


def masks(size: int) -> int:
    return sum(type(t) is torch.Tensor and t.dtype == torch.uint8 and t.shape == (size,) for t in gc.get_objects())


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store"])
def test_a_relu_keeps_a_bit_an_element_until_backward(memory: str) -> None:
    x, size = torch.randn(1013, 7), -(-1013 * 7 // 8)
    net = rg.MomentumNet([Mlp(7, 7) for _ in range(6)], form="relu", memory=memory, fixed_point=FIXED)
    y = net(x).sum()
    assert masks(size) == 6
    y.backward()
    assert not masks(size)
    with torch.no_grad():
        net(x)
    assert not masks(size)


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_weights_cast_by_autocast_are_held_for_one_block_only(inside: bool) -> None:
    """16 blocks with 4 MB of weights each; x is small."""
    x = torch.randn(2, 1_000, requires_grad=True)
    net = rg.MomentumNet([nn.Linear(1_000, 1_000) for _ in range(16)], memory="reverse")

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).float().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()

    step()
    assert peak_memory(step).peak < 5 * 2e6


def test_the_first_pass_takes_no_more_memory_than_later_ones() -> None:
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
    net, x = rg.MomentumNet(blocks, memory="reverse"), torch.randn(8, 16, 32, 32)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    first, second = (peak_memory(lambda: net(x).sum(), lambda loss: loss.backward()).peak for _ in range(2))
    assert first <= second * 1.02


def test_module_holds_no_pass(tmp_path) -> None:
    net = rg.MomentumNet([nn.Linear(256, 256) for _ in range(3)])
    y = net(torch.randn(4096, 256))
    torch.save(net, tmp_path / "net.pt")
    assert (tmp_path / "net.pt").stat().st_size < 1_000_000
    y.sum().backward()


def test_copies_pickles_and_state_dicts_after_a_forward() -> None:
    def made(**options: Any) -> rg.MomentumNet:
        return rg.MomentumNet([conv() for _ in range(4)], memory="reverse", **options)

    net, x, file = made(), torch.randn(2, 4, 5, 5), io.BytesIO()
    pending = net(x)
    net.eval()(x)
    expected = net(x).detach()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)
    fresh = made(fixed_point=net.fixed_point).eval()
    fresh.load_state_dict(net.state_dict())
    assert torch.allclose(fresh(x), expected, atol=1e-5)
    assert set(net.state_dict()) == {f"blocks.{k}" for k in net.blocks.state_dict()}
    pending.sum().backward()


def test_repr_says_what_it_is() -> None:
    text = rg.MomentumNet([Mlp()] * 3, gamma=0.99, velocity="first", form="relu").extra_repr()
    for part in (
        "depth=3",
        "gamma=99/100",
        "form='relu'",
        "velocity='first'",
        "memory='auto'",
        "fixed_point='auto'",
        "verify='auto'",
    ):
        assert part in text
