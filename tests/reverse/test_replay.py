"""What cannot be run again as it was is refused, also after an interruption; and the thread that backward runs in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from problems import Mlp, Of
from retrograde.reverse.cuda import SameThread
from retrograde.reverse.extra import Extra
from retrograde.reverse.forward import Pass
from retrograde.reverse.momentum import Momentum
from ways import begun, given, network

REPLAYING = ["reverse", "checkpoint"]


class Does(nn.Module):
    """tanh of a linear map; or, at every other run, without the tanh."""

    def __init__(self, how: str = "nothing") -> None:
        super().__init__()
        self.linear, self.how, self.runs = nn.Linear(8, 8), how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = self.linear(x)
        return y if self.how == "takes another path" and self.runs % 2 else y.tanh()


class Renorm(nn.BatchNorm1d):
    """Its output depends on its statistics."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return (x - self.running_mean) / (self.running_var + self.eps).sqrt() * self.weight


@pytest.mark.parametrize("memory", REPLAYING)
@pytest.mark.parametrize("kind", ["renorm", "functional batch norm", "replaced", "in place", "spectral norm", "tied"])
def test_buffers_that_a_block_moves_and_depends_on(memory: str, kind: str) -> None:
    """A replay finds them as they were; they move once. Two passes before their backward passes, one of which is run twice."""
    found = {}
    for way in ("store", memory):
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Mlp(), moving(kind), Mlp(), moving(kind)]
        blocks += [blocks[1]] * (kind == "tied")
        net = rg.MomentumNet(blocks, memory=way, fixed_point=rg.FixedPoint(20, torch.int32))
        seen = []
        for _ in range(3):
            net.zero_grad()
            losses = [net(torch.randn(3, 8)).square().sum() for _ in range(2)]
            for loss in reversed(losses):
                loss.backward(retain_graph=loss is losses[0])
            losses[0].backward()
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            seen += [*losses, *grads, *(b.clone() for b in net.buffers())]
        found[way] = [*seen, net.eval()(torch.ones(3, 8))]
    assert all(map(torch.equal, found["store"], found[memory]))


class Moving(nn.Module):
    """A moving average of what it sees, which is taken off it."""

    mean: Tensor

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.linear, self.replaces = nn.Linear(8, 8), replaces
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("still", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh() * self.still
        if self.training and self.replaces:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        elif self.training:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean


class Normed(Moving):
    """Statistics that PyTorch does not count as written to."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(self.linear(x), self.mean, self.still, training=self.training) - self.mean


def moving(kind: str) -> nn.Module:
    if kind == "functional batch norm":
        return Normed(replaces=False)
    if kind == "renorm":
        return Renorm(8)
    if kind == "spectral norm":
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())
    return Moving(replaces=kind == "replaced")


class Scaled(nn.Module):
    """Scales by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("still", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.still


def test_a_buffer_that_moves_for_the_first_time_later_is_refused_once() -> None:
    scaled = Scaled()
    net = rg.MomentumNet([Mlp(), nn.Sequential(Moving(replaces=False), scaled)], memory="reverse")
    for training in (False, True):  # other parts, of which all buffers are copied
        net.train(training)(torch.randn(3, 8)).sum().backward()
    scaled.register_forward_pre_hook(lambda module, args: None if module.still.add_(0.5) is None else args)
    with pytest.raises(rg.ReplayError, match="block 1 changed its buffer 'still', which it had not done before"):
        net(torch.randn(3, 8))
    net(torch.randn(3, 8)).sum().backward()


@pytest.mark.parametrize("memory", REPLAYING)
@pytest.mark.parametrize("kind", ["a view", "an attribute", "two names"])
def test_a_moved_buffer_with_another_name_is_refused(memory: str, kind: str) -> None:
    """A replay finds its value of before by one name alone."""

    class Named(Moving):
        def __init__(self) -> None:
            super().__init__(replaces=False)
            if kind == "an attribute":
                self.other = self.mean
            else:
                self.register_buffer("other", self.mean[:] if kind == "a view" else self.mean)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + self.other)

    with pytest.raises(
        rg.ReplayError, match="block 1 changed its buffer 'mean' while it ran, and that shares its memory"
    ):
        rg.MomentumNet([Mlp(), Named()], memory=memory)(torch.randn(3, 8))


@pytest.mark.parametrize("memory", REPLAYING)
def test_statistics_that_begin_to_move_with_a_counter_beside_them(memory: str) -> None:
    """The first batch is zero, so that the running mean stays what it was; the counter moves."""
    found = {}
    for way in ("store", memory):
        torch.manual_seed(0)
        net = rg.MomentumNet([Mlp(), nn.Sequential(nn.Linear(8, 8, bias=False), Renorm(8))], memory=way,
                             fixed_point=rg.FixedPoint(20, torch.int32))  # fmt: skip
        for x in (torch.zeros(3, 8), torch.randn(3, 8), torch.randn(3, 8)):
            net(x).square().sum().backward()
        found[way] = [*net.buffers(), *(p.grad for p in net.parameters() if p.grad is not None)]
    assert all(map(torch.equal, found["store"], found[memory]))


@pytest.mark.parametrize("memory", REPLAYING)
def test_a_buffer_that_is_written_to_between_forward_and_backward_is_refused(memory: str) -> None:
    scaled = Scaled()
    y = rg.MomentumNet([Mlp(), nn.Sequential(Moving(replaces=False), scaled)], memory=memory)(torch.randn(3, 8))
    scaled.still.mul_(2)
    with pytest.raises(rg.ReplayError, match="the buffer 'still' of block 1 was changed after its forward pass"):
        y.sum().backward()


@pytest.mark.parametrize("memory", REPLAYING)
def test_statistics_that_move_between_forward_and_backward_of_an_evaluation(memory: str) -> None:
    net = rg.MomentumNet([Does(), nn.BatchNorm1d(8)], memory=memory, verify="off").eval()
    y = net(torch.randn(3, 8))
    net.train().blocks[1](torch.randn(3, 8))
    with pytest.raises(rg.ReplayError, match="of block 1 was changed"):
        y.sum().backward()


def test_a_tied_block_that_is_updated_between_its_two_uses() -> None:
    block, other = Does(), Does()
    y = rg.MomentumNet([block, other, block], memory="reverse")(torch.randn(2, 8))
    other.linear.weight.register_hook(torch.no_grad()(lambda g: block.linear.weight.sub_(g).sum().fill_(0) + g))
    with pytest.raises(rg.ReplayError, match="block 0 was changed after its forward"):
        y.sum().backward()


def test_other_tensors_saved_are_noticed_without_checks() -> None:
    net = rg.MomentumNet([Mlp(), Does("takes another path")], memory="reverse", verify="off")
    with pytest.raises(rg.ReplayError, match=r"block 1 did not repeat itself: .* saved"):
        net(torch.randn(3, 8)).sum().backward()


# interruptions ---------------------------------------------------------------------------------------------------------


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


class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.mul_(0.5)


def doubled(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: (gradient.mul_(2), None)[1])
    return x


@pytest.mark.parametrize("change", [Greedy.apply, doubled])
@pytest.mark.parametrize(("scheme", "options"), [("branch", {}), ("branch", {"velocity": "first"}), ("coupling", {})])
def test_a_gradient_changed_in_place_inside_of_a_block_is_refused(scheme: str, options: Any, change: Any) -> None:
    blocks = [Of(lambda block, x: change(block.f(x)), f=nn.Linear(4, 4)) for _ in range(4)]
    net, x = network(scheme, blocks, memory="reverse", **options), given(scheme, torch.randn(2, 4))
    with pytest.raises(rg.ReplayError, match="changed in place inside a block's backward pass"):
        net(x.requires_grad_()).square().sum().backward()


# threads ---------------------------------------------------------------------------------------------------------------


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


class Force(nn.Module):
    """f(x) = −∇E(x), a gradient taken inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("gamma", [0, 0.9])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_gradient_taken_inside_a_block_leaves_what_autocast_has_cast(gamma: float, autocast: bool) -> None:
    """What the block has saved is made again there. Weights cast before it are cast once for both of their uses."""
    found = []
    for memory in ("store", "checkpoint", *(["reverse"] if gamma else [])):
        torch.manual_seed(0)
        twice = Mlp()
        net = rg.MomentumNet([twice, Force(), twice], gamma=gamma, memory=memory)
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = net(x)
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
