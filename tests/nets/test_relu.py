"""form="relu": the step forms relu(x + f) itself. The network of form="block" with both in its blocks, bit for bit in every mode."""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from problems import KINDS, Mlp, same_in_every_mode, stack
from retrograde.core.call import Extra
from retrograde.core.fixedpoint import FixedPoint, integer_dtype
from retrograde.core.rational import as_ratios
from retrograde.kernels import native
from retrograde.memory.modes import MemoryPlan
from retrograde.stack.forward import Forward
from retrograde.stack.momentum import Recurrence

MODES = ["reverse", "checkpoint", "store"]


class Whole(nn.Module):
    """relu(x + f(x)), as ResNets write it."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.f(x).clone().add_(x))


class Conv(nn.Module):
    """A ResNet's branch, with dropout."""

    def __init__(self, channels: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.drop(torch.relu(self.bn1(self.conv1(x))))))


def pair(branches: list[nn.Module], **options: object) -> tuple[rg.MomentumNet, rg.MomentumNet]:
    """The same network in form "relu" and in form "block"."""
    relu = rg.MomentumNet(copy.deepcopy(branches), form="relu", **options)
    block = rg.MomentumNet([Whole(b) for b in copy.deepcopy(branches)], form="block", **options)
    return relu, block


def grads(net: nn.Module, x: Tensor, autocast: bool = False) -> tuple[Tensor, list[Tensor]]:
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = net(leaf)
    return y.detach(), list(torch.autograd.grad(y.float().square().mean(), [leaf, *net.parameters()]))


@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_network_whose_blocks_add_and_rectify(kind: str, memory: str, velocity: str | None) -> None:
    branches, x = stack(kind, 9)
    relu, block = (net.double() for net in pair(branches, velocity=velocity, memory=memory))
    (y, ours), (z, theirs) = (grads(net, x.double()) for net in (relu, block))
    assert torch.equal(y, z)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_have_the_same_bits_in_every_dtype(dtype: torch.dtype) -> None:
    relu, block = (net.to(dtype) for net in pair([Conv() for _ in range(8)]))
    x = torch.randn(3, 8, 5, 5).to(dtype)
    assert torch.equal(relu(x), block(x))


def test_autocast_rounds_the_sum_as_an_addition_in_place_does() -> None:
    relu, block = pair([Conv() for _ in range(8)], memory="reverse")
    x = torch.randn(3, 8, 5, 5)
    (y, ours), (z, theirs) = (grads(net, x, autocast=True) for net in (relu, block))
    assert torch.equal(y, z)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("state_bits", ["auto", 16])
def test_no_mode_changes_a_bit(autocast: bool, layout: torch.memory_format, state_bits: int | str) -> None:
    """BatchNorm in training, dropout, the default verify, sizes that fill no byte."""
    branches = [Conv(3, drop=0.2) for _ in range(12)]
    x = torch.randn(3, 3, 5, 7).contiguous(memory_format=layout)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        net = rg.MomentumNet(branches, form="relu", state_bits=state_bits)
        found = same_in_every_mode(net, x.requires_grad_())
    assert found["input"].any()


def test_gradients_that_come_in_another_layout() -> None:
    net, x = rg.MomentumNet([Conv(4) for _ in range(4)], form="relu", memory="reverse"), torch.randn(2, 4, 6, 6)
    weight, found = torch.randn(2, 4, 6, 6), []
    for layout in (torch.contiguous_format, torch.channels_last):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(net(leaf), leaf, weight.contiguous(memory_format=layout))[0])
    assert (found[0] - found[1]).norm() < 1e-5 * found[0].norm()


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("velocity", [None, "first"])
def test_gradcheck_in_float64(memory: str, velocity: str | None) -> None:
    net = rg.MomentumNet([Mlp(3, 4) for _ in range(5)], form="relu", velocity=velocity, memory=memory).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    net(x)
    assert torch.autograd.gradcheck(net, (x,), eps=1e-6, atol=1e-6, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(net, (x,), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("velocity", [None, "first"])
@pytest.mark.parametrize("gamma", [[0.9], [0.5, 0.9], [1, 0.3, 0.99], [0.9, 0.99, 1], [0.2, 1, 0.5, 0.7]])
def test_short_stacks_and_gammas_that_differ(gamma: list[float], velocity: str | None) -> None:
    """The last step leaves the gradient of x to the step before it, which has another γ or is not there."""
    branches, x = stack("mlp", len(gamma))
    for memory in MODES:
        relu, block = (net.double() for net in pair(branches, gamma=gamma, velocity=velocity, memory=memory))
        (y, ours), (z, theirs) = (grads(net, x.double()) for net in (relu, block))
        assert torch.equal(y, z)
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).norm() <= 1e-12 * b.norm()
    same_in_every_mode(rg.MomentumNet(branches, form="relu", gamma=gamma, velocity=velocity), x.requires_grad_())


@pytest.mark.parametrize("gamma", [[0.5, 0], [0, 0.5], [0.9, 0, 0]])
def test_steps_without_velocity(gamma: list[float]) -> None:
    branches, x = stack("mlp", len(gamma))
    for memory in ("checkpoint", "store"):
        relu, block = (net.double() for net in pair(branches, gamma=gamma, memory=memory))
        (y, ours), (z, theirs) = (grads(net, x.double()) for net in (relu, block))
        assert torch.equal(y, z)
        assert all((a - b).norm() <= 1e-12 * b.norm() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_graph_of_the_backward_pass_and_a_batch_of_them_change_no_bit(dtype: torch.dtype, memory: str) -> None:
    net = rg.MomentumNet([Mlp() for _ in range(4)], form="relu", memory=memory).to(dtype)
    x, weights = torch.randn(5, 8).to(dtype).requires_grad_(), torch.randn(3, 5, 8).to(dtype)
    y = net(x)
    alone = [torch.autograd.grad(y, x, w, retain_graph=True)[0] for w in weights]
    graph = [torch.autograd.grad(y, x, w, create_graph=True)[0].detach() for w in weights]
    assert all(torch.equal(a, b) for a, b in zip(alone, graph, strict=True))
    (batch,) = torch.autograd.grad(y, x, weights, is_grads_batched=True)
    assert (batch - torch.stack(alone)).float().norm() <= 4 * torch.finfo(dtype).eps * batch.float().norm()


@pytest.mark.parametrize("plan", [(6, 0, 0), (4, 1, 1), (4, 2, 0), (5, 0, 1), (0, 5, 1), (3, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_reversed_kept_and_stored_blocks_in_one_pass(plan: tuple[int, int, int], dtype: torch.dtype) -> None:
    blocks, x = nn.ModuleList([Conv(3) for _ in range(6)]).to(dtype), torch.randn(3, 3, 5, 7).to(dtype)
    recurrence, fixed = Recurrence(as_ratios(0.9, 6), "relu"), FixedPoint(18, integer_dtype(dtype))
    found = []
    for how in (MemoryPlan(0, 0, 6), MemoryPlan(*plan)):
        leaf = x.clone().requires_grad_()
        run = Forward(leaf, recurrence, fixed, verify="end", **how.arguments)
        for block in blocks:
            run.step(block, Extra((), {}))
        found.append(torch.autograd.grad(run.finish().float().square().mean(), [leaf, *blocks.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Contiguous(Conv):
    """Its input's gradient is laid out another way than a channels_last input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.contiguous())


@pytest.mark.parametrize("whole", [set(), {0}, {1}, {2}, {0, 1}])
def test_steps_of_both_kinds_and_gradients_in_another_layout(whole: set[int]) -> None:
    branches, x = [Contiguous(4).double() for _ in range(3)], torch.randn(2, 4, 3, 5, dtype=torch.float64)
    found = []
    for form in ("block", "relu"):
        leaf = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        run = Forward(leaf, Recurrence(as_ratios(0.9, 3), form), FixedPoint(40, torch.int64), mode="store")
        for k, f in enumerate(branches):
            block = Whole(f) if form == "block" or k in whole else f
            run.step(block, Extra((), {}), whole=form == "relu" and k in whole)
        weights = [p for f in branches for p in f.parameters()]
        found.append(torch.autograd.grad(run.finish().square().mean(), [leaf, *weights]))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_body_changes_no_bit(layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    net = rg.MomentumNet([Conv(8) for _ in range(3)], form="relu", memory="store", fraction_bits=18).eval()
    x = torch.randn(3, 8, 33, 101).contiguous(memory_format=layout)
    compiled = grads(net, x)[1]
    monkeypatch.setattr(native, "load_carry", lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(compiled, grads(net, x)[1], strict=True))


def test_gradients_of_x_and_v_and_the_inverse() -> None:
    branches, x = stack("mlp", 10)
    relu, block = (net.double() for net in pair(branches, velocity="first", fraction_bits=40))
    found = []
    for net in (relu, block):
        leaf = x.double().requires_grad_()
        state = net.encode(leaf)
        found.append(torch.autograd.grad((state.v * 3).square().sum(), [leaf, *net.parameters()]))
        assert torch.equal(net.inverse(state), state.fixed.decode(state.fixed.encode(x.double()), torch.float64))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("memory", MODES)
def test_a_second_backward_needs_the_graph(memory: str) -> None:
    branches, x = stack("mlp", 5)
    net = rg.MomentumNet(branches, form="relu", memory=memory)
    loss = net(x).square().sum()
    wanted = list(net.parameters())
    first, second = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.autograd.grad(loss, wanted)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(loss, wanted)


def masks(of: int) -> list[Tensor]:
    found = (t for t in gc.get_objects() if type(t) is Tensor and t.dtype == torch.uint8)
    return [t for t in found if t.shape == (of,)]


@pytest.mark.parametrize("memory", MODES)
def test_a_bit_an_element_is_kept_until_backward(memory: str) -> None:
    x = torch.randn(1013, 7)
    net = rg.MomentumNet([Mlp(7, 7) for _ in range(6)], form="relu", memory=memory, fraction_bits=20)
    y = net(x).sum()
    assert len(masks(-(-1013 * 7 // 8))) == 6
    y.backward()
    assert not masks(-(-1013 * 7 // 8))
    with torch.no_grad():
        net(x)
    assert not masks(-(-1013 * 7 // 8))


def test_blocks_may_write_to_their_input_and_checkpoints_may_be_around() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mul_(0.5))

    x = torch.randn(3, 8)
    net = rg.MomentumNet([Writes() for _ in range(6)], form="relu", fraction_bits=20)
    same_in_every_mode(net, x.requires_grad_())
    whole = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    again = torch.autograd.grad(checkpoint(net, x, use_reentrant=False).sum(), list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_a_nan_is_seen() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float("nan")

    with pytest.raises(rg.RangeOverflow, match="NaN or Inf"):
        rg.MomentumNet([Bad()], form="relu", fraction_bits=20)(torch.ones(9))
    assert rg.MomentumNet([Bad()], form="relu", overflow="nan")(torch.ones(9)).isnan().all()


def test_the_form_is_named() -> None:
    net = rg.MomentumNet([Mlp()], form="relu")
    assert "form='relu'" in repr(net)
    with pytest.raises(ValueError, match="'relu'"):
        rg.MomentumNet([Mlp()], form="gelu")


@pytest.mark.parametrize("form", ["branch", "block", "relu"])
@pytest.mark.parametrize("gamma", [0.9, 0.999])
def test_small_gradients_of_float16_are_not_lost(form: str, gamma: float) -> None:
    """What is carried is (1 − γ) times a gradient, which float16 would round to 0."""
    f, start = [nn.Linear(16, 16).half() for _ in range(4)], torch.randn(8, 16).half()

    def moved(x: Tensor, y: Tensor) -> Tensor:
        return {"branch": y, "block": y - x, "relu": (x + y).relu() - x}[form]

    x, exact = start.clone().requires_grad_(), start.double().requires_grad_()
    y = rg.MomentumNet(f, gamma, form=form)(x)
    y.backward(torch.full_like(y, 1e-5))
    z, v = exact, torch.zeros_like(exact)
    for linear in f:
        v = gamma * v + (1 - gamma) * moved(z, nn.functional.linear(z, linear.weight.double(), linear.bias.double()))
        z = z + v
    z.backward(torch.full_like(z, 1e-5))
    assert (x.grad.double() - exact.grad).norm() <= 0.02 * exact.grad.norm()
