"""What cannot be run again as it was is refused, and a replay that is interrupted, or runs beside another thread, leaves no trace."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from ways import assert_equal, begun

import retrograde as rg
from problems import Mlp, conv
from retrograde.reverse.cuda import SameThread
from retrograde.reverse.extra import Extra
from retrograde.reverse.forward import Pass
from retrograde.reverse.momentum import Momentum

REPLAYING = ["reverse", "checkpoint"]


class Does(nn.Module):
    """tanh of a linear map, times a buffer; `how` says what its forward does besides."""

    def __init__(self, how: str = "nothing") -> None:
        super().__init__()
        self.linear, self.how, self.runs = nn.Linear(8, 8), how, 0
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        self.runs += 1
        y = self.linear(x + shift)
        if self.how == "replaces its buffer":
            self.scale = 0.9 * self.scale + 0.1 * y.detach().mean(0)
        elif self.how == "updates its buffer":
            self.scale.mul_(0.9)
        elif self.how == "overwrites what is saved":
            return torch.exp(y).add_(1)
        elif self.how == "takes another path" and self.runs % 2:
            return y
        elif self.how == "fails":
            raise KeyboardInterrupt
        return y.tanh() * self.scale


class Renorm(nn.BatchNorm1d):
    """Its output depends on its statistics."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return (x - self.running_mean) / (self.running_var + self.eps).sqrt() * self.weight


@pytest.mark.parametrize("memory", REPLAYING)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Does("replaces its buffer"), r"block 1 replaced its buffer 'scale' .*memory='store'"),
        (lambda: Does("updates its buffer"), r"block 1 changed a parameter, a buffer .*memory='store'"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), r"block 1 changed .*memory='store'"),
        (lambda: Renorm(8), "block 1 changed"),
        (lambda: Does("overwrites what is saved"), "block 1 changed a tensor in place"),
    ],
)
def test_blocks_that_cannot_be_run_again_are_refused_in_forward(make: Any, says: str, memory: str) -> None:
    net = rg.MomentumNet([Mlp(), make()], memory=memory)
    with pytest.raises(rg.ReplayError, match=says):
        net(torch.randn(3, 8))
    if "in place" not in says:
        net.memory = "store"
        net(torch.randn(3, 8)).sum().backward()


def between(change: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(change)


CHANGES: dict[str, tuple[Any, str]] = {
    "parameter": (
        between(lambda net, shift: net.blocks[1].linear.weight.add_(1)),
        "block 1 was changed after its forward",
    ),
    "buffer": (between(lambda net, shift: net.blocks[1].scale.mul_(2)), "block 1 was changed after its forward"),
    "extra input": (between(lambda net, shift: shift.add_(1)), "extra input"),
    "statistics in evaluation": (
        between(lambda net, shift: net.train().blocks[2](torch.randn(3, 8))),
        "block 2 was changed",
    ),
}


@pytest.mark.parametrize("memory", REPLAYING)
@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_forward_and_backward(what: str, memory: str) -> None:
    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return super().forward(x)

    net, shift = rg.MomentumNet([Does(), Does(), Norm(8)], memory=memory, verify="off").eval(), torch.zeros(8)
    y = net(torch.randn(3, 8), shift)
    change, says = CHANGES[what]
    if what == "statistics in evaluation":
        net.blocks[2].__class__ = nn.BatchNorm1d
    change(net, shift)
    with pytest.raises(rg.ReplayError, match=says):
        y.sum().backward()


def test_a_tied_block_that_is_updated_between_its_two_uses() -> None:
    block, other = Does(), Does()
    y = rg.MomentumNet([block, other, block], memory="reverse")(torch.randn(2, 8))
    other.linear.weight.register_hook(between(lambda g: block.linear.weight.sub_(g).sum().fill_(0) + g))
    with pytest.raises(rg.ReplayError, match="block 0 was changed after its forward"):
        y.sum().backward()


def test_other_tensors_saved_are_noticed_without_checks() -> None:
    net = rg.MomentumNet([Mlp(), Does("takes another path")], memory="reverse", verify="off")
    with pytest.raises(rg.ReplayError, match=r"block 1 did not repeat itself: .* saved"):
        net(torch.randn(3, 8)).sum().backward()


# interruptions ---------------------------------------------------------------------------------------------------------


def traces(net: nn.Module) -> list[Any]:
    """What a replay might leave behind in the modules, and in PyTorch."""
    modules = [(m.training, *(id(t) for t in (*m._parameters.values(), *m._buffers.values()))) for m in net.modules()]
    return [modules, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_rng_state().tolist()]


class Interrupts(nn.Module):
    """Raises at its `at`-th run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.at = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == self.at:
            raise KeyboardInterrupt
        return x.tanh()


@pytest.mark.parametrize("memory", REPLAYING)
@pytest.mark.parametrize("which", [0, 2, 4])
def test_an_interrupted_replay_leaves_no_trace(which: int, memory: str) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), Interrupts(), nn.Linear(8, 8))

    net, x = rg.MomentumNet([block() for _ in range(5)], memory=memory), torch.randn(6, 8)
    net(x)
    torch.manual_seed(3)
    statistics = copy.deepcopy(net.state_dict())
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    net.load_state_dict(statistics)
    torch.manual_seed(3)
    loss = net(x).square().sum()
    net.eval()  # as it is found, not as it was
    before, values = traces(net), copy.deepcopy(net.state_dict())
    stops = net.blocks[which][3]
    stops.at = stops.runs + 1
    with torch.autocast("cpu", torch.bfloat16, enabled=False), pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    assert traces(net) == before
    assert_equal(list(net.state_dict().values()), list(values.values()))
    net.train()
    try:  # right, or refused
        assert_equal(torch.autograd.grad(loss, list(net.parameters())), expected)
    except RuntimeError as error:
        assert "Run the forward pass again" in str(error)  # noqa: PT017
        assert memory == "reverse"
    net(x).sum().backward()


class Failing(Momentum):
    """A state whose step fails, half-way through, at its `at`-th call."""

    step, at, calls = "", 0, 0

    def failing(self, name: str) -> None:
        if name == self.step:
            self.calls += 1
            if self.calls == self.at:
                self.x.add_(1)
                raise MemoryError

    def pull(self, k: int) -> Tensor:
        self.failing("pull")
        return super().pull(k)

    def recede(self, k: int, y: Tensor) -> Tensor:
        self.failing("recede")
        return super().recede(k, y)

    def retreat(self, k: int, y: Tensor) -> None:
        self.failing("retreat")
        super().retreat(k, y)

    def advance(self, k: int, y: Tensor) -> Tensor:
        self.failing("advance")
        return super().advance(k, y)


@pytest.mark.parametrize(("step", "at"), [("pull", 1), ("recede", 2), ("retreat", 1), ("advance", 2)])
def test_an_interrupted_step_is_not_gone_on_from(step: str, at: int) -> None:
    blocks, x = [nn.Sequential(Mlp(), nn.Tanh()) for _ in range(5)], torch.randn(3, 8)
    net = rg.MomentumNet(blocks, memory="reverse")
    state = Failing(x, net.recurrence, begun(net, x), reversible=True)
    run = Pass(state, x, 5, reversed=5, verify="auto")
    for block in blocks:
        run.step(block, Extra((), {}))
    loss = run.finish().square().sum()
    if step in ("retreat", "advance"):
        loss.backward(retain_graph=True)  # the next pass seeks forward
    state.step, state.at = step, at
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    state.step = ""
    with pytest.raises(RuntimeError, match="Run the forward pass again"):
        loss.backward()


@pytest.mark.parametrize("memory", REPLAYING)
def test_backward_twice_without_retain_graph_changes_no_gradient(memory: str) -> None:
    net = rg.MomentumNet([Mlp() for _ in range(4)], memory=memory)
    loss = net(torch.randn(3, 8)).sum()
    loss.backward()
    before = [p.grad.clone() for p in net.parameters()]
    with pytest.raises(RuntimeError, match=r"retain_graph|second time"):
        loss.backward()
    assert_equal([p.grad for p in net.parameters()], before)


def test_a_gradient_changed_in_place_inside_of_backward_is_refused() -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.mul_(0.5)

    class Block(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return Greedy.apply(super().forward(x))

    net = rg.MomentumNet([Block() for _ in range(4)], memory="reverse")
    with pytest.raises(rg.ReplayError, match="changed in place inside a block's backward pass"):
        net(torch.randn(3, 8)).sum().backward()


# threads ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [*REPLAYING, "store"])
def test_two_trainings_side_by_side(memory: str) -> None:
    """Each has its own network; neither disturbs the other."""

    def train(seed: int, x: Tensor, found: dict[int, Any], start: threading.Barrier | None) -> None:
        net = rg.MomentumNet(copy.deepcopy(blocks[seed]), memory=memory)
        if start is not None:
            start.wait()
        for _ in range(6):
            net.zero_grad()
            y = net(x)
            y.square().sum().backward()
        found[seed] = [y.detach(), *(p.grad for p in net.parameters()), *net.buffers()]

    blocks = [nn.ModuleList(conv() for _ in range(4)) for _ in range(2)]
    x, alone, together = torch.randn(2, 4, 5, 5), dict[int, Any](), dict[int, Any]()
    for seed in range(2):
        train(seed, x, alone, None)
    start = threading.Barrier(2)
    threads = [threading.Thread(target=train, args=(seed, x, together, start)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        assert_equal(together[seed], alone[seed])


def test_one_network_evaluated_from_four_threads() -> None:
    net, failed = rg.MomentumNet([Mlp() for _ in range(4)]).eval(), list[str]()
    xs = [torch.randn(3, 8) for _ in range(4)]
    with torch.no_grad():
        for _ in range(3):
            wanted = [net(x) for x in xs]

    def serve(k: int) -> None:
        with torch.no_grad():
            for _ in range(100):
                if (net(xs[k]) - wanted[k]).abs().max() > 1e-5:
                    failed.append("another output")

    threads = [threading.Thread(target=serve, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_backward_stays_on_its_thread_while_needed() -> None:
    enabled, elsewhere = torch._C._is_multithreading_enabled, list[bool]()
    assert enabled()
    first, second = SameThread(), SameThread()
    assert not enabled()
    thread = threading.Thread(target=lambda: elsewhere.append(enabled()))
    thread.start()
    thread.join()
    del first
    assert not enabled()
    del second
    assert enabled()
    assert elsewhere == [True]
    with torch.autograd.set_multithreading_enabled(False):
        keeper = SameThread()
        del keeper
        assert not enabled()  # the user's own setting
    assert enabled()


def test_the_setting_comes_back_with_the_end_of_the_graph() -> None:
    """On CUDA tensors, a state's gradient holds a `SameThread`."""
    net, x = rg.MomentumNet([Mlp() for _ in range(3)]), torch.randn(3, 8)
    state = Momentum(x, net.recurrence, begun(net, x), reversible=True)
    state.gradient.thread = SameThread()
    run = Pass(state, x, 3, reversed=3)
    for block in net.blocks:
        run.step(block, Extra((), {}))
    loss = run.finish().sum()
    assert not torch._C._is_multithreading_enabled()
    loss.backward()
    del loss, run, state
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_a_model_that_gets_another_dtype_before_backward_is_refused(memory: str) -> None:
    """No version counts it, and what a matrix product says of it helps nobody."""
    net = rg.MomentumNet([nn.Linear(4, 4) for _ in range(3)], memory=memory)
    loss = net(torch.ones(2, 4)).sum()
    net.double()
    with pytest.raises(rg.ReplayError, match=r"block 2 were made torch.float64 after its forward pass.*float32"):
        loss.backward()


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_torch_func_inside_a_block_is_refused_by_name(memory: str) -> None:
    class Energy(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: super(Energy, self).forward(x).square().sum())(x)

    with pytest.raises(rg.ReplayError, match=r"block 0 calls torch.func.grad.*memory='store'"):
        rg.MomentumNet([Energy(4) for _ in range(2)], memory=memory)(torch.ones(2, 4))


class Bell(torch.autograd.Function):
    """exp(-x²), whose backward makes the gradient in the memory of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.exp(-x * x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return y.mul_(-2 * x).mul_(gradient)


class Belled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return Bell.apply(super().forward(x))


@pytest.mark.parametrize("verify", ["auto", "strict"])
def test_a_function_may_write_to_the_output_it_saved(verify: str) -> None:
    found = []
    for memory in ("store", "reverse", "checkpoint"):
        torch.manual_seed(0)
        net = rg.MomentumNet([Belled(4) for _ in range(4)], memory=memory, verify=verify)
        net(torch.ones(2, 4)).sum().backward()
        found.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
