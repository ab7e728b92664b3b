"""Blocks that end in products, whose replay stops early: what changes in between shows, and hooks of others are left alone."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from retrograde.stack import ledger

Forward = Callable[["Parts", Tensor], Tensor]


@pytest.fixture(autouse=True, params=["one by one", "together"])
def hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors as on a CPU, and as on an accelerator: one hash of all."""
    if request.param == "together":
        monkeypatch.setattr(ledger, "_ALONE", set())


class Parts(nn.Module):
    """Linear maps, a gate of zeros, and a scale that nobody sees from outside."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.zero, self.scale, self.run = nn.Parameter(torch.zeros(8)), 1.0, run
        self.side: Tensor | float = 0.0
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def gate_of_zeros(m: Parts, x: Tensor) -> Tensor:
    """An adapter that has not been trained yet: its gradient depends on what it is multiplied with."""
    return m.b((m.a(x) + m.c(x * m.scale) * m.zero).tanh())


def side_loss(m: Parts, x: Tensor) -> Tensor:
    m.side = m.c(x * m.scale).square().mean()
    return m.b(m.a(x).tanh())


def stopped_gradient(m: Parts, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.where(torch.full((8,), m.scale) > 0.7, h, h.detach()))


def two_views_at_one_address(m: Parts, x: Tensor) -> Tensor:
    odd = torch.where(torch.arange(16) % 2 == 1, m.scale, 1.0)
    h = (m.a(x).tanh().repeat(1, 2) * odd).contiguous()
    return m.b(h[:, ::2]) + m.c(h[:, :8])


def a_count_beside_a_product(m: Parts, x: Tensor) -> Tensor:
    """A single whole number, which in fused attention would be a place of a generator and of no defined value."""
    return m.b(x.sin()) + m.a(x).sum(-1, keepdim=True) / torch.tensor(2 if m.scale == 1 else 3)


def bytes_in_a_row(m: Parts, x: Tensor) -> Tensor:
    return m.b(x.sin()) + (m.a(x) * torch.full((8,), int(2 * m.scale), dtype=torch.uint8)).sum(-1, keepdim=True)


def checkpoint_inside(m: Parts, x: Tensor) -> Tensor:
    return checkpoint(lambda h: m.b(h.tanh()), m.a(x) * m.scale, use_reentrant=False)


def hooks_that_copy(m: Parts, x: Tensor) -> Tensor:
    h = (m.a(x) * m.scale).tanh()
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1):
        return m.b(h)


def hooks_that_give_once(m: Parts, x: Tensor) -> Tensor:
    h, kept = (m.a(x) * m.scale).tanh(), dict[int, Tensor]()

    def pack(t: Tensor) -> int:
        kept[id(t)] = t
        return id(t)

    with saved_tensors_hooks(pack, kept.pop):
        return m.b(h)


BLOCKS = [
    gate_of_zeros, side_loss, stopped_gradient, two_views_at_one_address, a_count_beside_a_product, bytes_in_a_row,
    checkpoint_inside, hooks_that_copy, hooks_that_give_once,
]  # fmt: skip


def gradients(run: Forward, memory: str, gamma: float, verify: str, changed: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    bits = {"fraction_bits": 22} if gamma else {}
    net = rg.MomentumNet([Parts(run) for _ in range(3)], gamma=gamma, memory=memory, verify=verify, **bits)
    x = torch.randn(4, 8, requires_grad=True)
    loss = net(x).square().sum() + sum(block.side for block in net.blocks)
    if changed:
        net.blocks[1].scale = 0.5
    loss.backward()
    return [x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("verify", ["auto", "end", "blocks"])
@pytest.mark.parametrize("gamma", [0.9, 0.0])
@pytest.mark.parametrize("run", BLOCKS)
def test_right_to_the_bit_or_refused(run: Forward, gamma: float, verify: str) -> None:
    expected = gradients(run, "store", gamma, "off", changed=False)
    found = gradients(run, "checkpoint", gamma, verify, changed=False)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(rg.ReplayError):
        gradients(run, "checkpoint", gamma, verify, changed=True)


def gate_after_a_tanh(m: Parts, x: Tensor) -> Tensor:
    """The output does not show what the gate is multiplied with, and there is no last product to stop at."""
    return m.a(x).tanh() + m.zero * (x * m.scale)


def straight_through(m: Parts, x: Tensor) -> Tensor:
    """Part of the gradient is let through, all of the value."""
    y, mask = m.a(x), torch.full((8,), m.scale) > 0.7
    return y * mask + (y * ~mask).detach()


class Scaled(torch.autograd.Function):
    """The identity, and a multiple of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


def own_function(m: Parts, x: Tensor) -> Tensor:
    return Scaled.apply(m.a(x).tanh(), torch.tensor([m.scale]))


def straight_through_beside_a_norm(m: Parts, x: Tensor) -> Tensor:
    """The mask has the shape of the running statistics, which are not compared."""
    return m.norm(straight_through(m, x))


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize(
    "run", [*BLOCKS, gate_after_a_tanh, straight_through, straight_through_beside_a_norm, own_function]
)
def test_blocks_also_sees_what_enters_the_gradient_alone(run: Forward, memory: str) -> None:
    expected = gradients(run, "store", 0.9, "off", changed=False)
    found = gradients(run, memory, 0.9, "blocks", changed=False)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(rg.ReplayError, match="block 1 did not repeat itself"):
        gradients(run, memory, 0.9, "blocks", changed=True)


@pytest.mark.parametrize("inner", ["checkpoint", "network"])
def test_what_is_inside_a_block_is_not_run_again_in_forward(inner: str) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.runs = nn.BatchNorm1d(8), nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return self.linear(self.norm(x).tanh())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.net = rg.MomentumNet([self.inner], gamma=0, memory="checkpoint") if inner == "network" else None

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False) if self.net is None else self.net(x)

    net = rg.MomentumNet([Outer(), Outer()], memory="checkpoint", fraction_bits=20)
    y = net(torch.randn(4, 8))
    assert [block.inner.runs for block in net.blocks] == [1, 1]
    assert [int(block.inner.norm.num_batches_tracked) for block in net.blocks] == [1, 1]
    y.sum().backward()


class Leaky(nn.Module):
    """A random relu in eval mode: its noise is not drawn, and no gradient depends on it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how, self.scale = nn.Linear(64, 64), nn.Linear(64, 64), how, 1.0
        self.module = nn.RReLU(inplace=how == "in a view") if how in ("module", "in a view") else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x[None])[0] if self.how == "in a view" else self.a(x)
        h = self.module(h) if self.module is not None else F.rrelu(h, training=False, inplace=self.how == "in place")
        return h.tanh() + self.b(x * self.scale) * 0 if self.how == "inside" else self.b(h * self.scale)


class Ctc(nn.Module):
    """A loss over all ways to align labels: its table is written as far as there are any."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how, self.scale = nn.Linear(64, 64), nn.Linear(64, 64), how, 1.0
        self.side: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        chances = self.a(x).log_softmax(-1).view(15, 2, 64)
        loss = F.ctc_loss(chances, torch.arange(1, 17).view(2, 8), [15, 15], [2, 8])
        self.side = loss if self.how == "aside" else 0.0
        return self.b((x * self.scale).sin() * (1.0 if self.how == "aside" else loss))


UNFILLED = [
    (Leaky, "module"),
    (Leaky, "functional"),
    (Leaky, "in place"),
    (Leaky, "in a view"),
    (Leaky, "inside"),
    (Ctc, "within"),
    (Ctc, "aside"),
]
UNSEEN = [("reverse", "auto"), ("reverse", "end")]  # what moves no output


def litter() -> None:
    """Leave something else in the memory that is given out next."""
    junk = [torch.full(shape, float(k)) for shape in ((30, 64), (2, 15, 17)) for k in range(50)]
    del junk


@pytest.mark.parametrize("verify", ["auto", "end", "blocks"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@pytest.mark.parametrize(("kind", "how"), UNFILLED)
def test_memory_that_an_operation_saves_without_writing_it(kind: Any, how: str, memory: str, verify: str) -> None:
    torch.manual_seed(0)
    net = rg.MomentumNet([kind(how) for _ in range(6)], memory=memory, verify=verify, velocity="first").eval()
    x = torch.randn(30, 64)
    for changed in (False, True):
        loss = net(x).square().sum() + sum(getattr(block, "side", 0.0) for block in net.blocks)
        litter()
        net.blocks[2].scale = 0.5 if changed else 1.0
        with (
            pytest.raises(rg.ReplayError)
            if changed and (how != "inside" or (memory, verify) not in UNSEEN)
            else nullcontext()
        ):
            loss.backward()


def test_noise_that_is_drawn_is_compared() -> None:
    class Noisy(nn.Module):
        """In training, from a generator that is not put back; what is drawn enters what is saved alone."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.own = nn.Linear(8, 8), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            noisy = torch.ops.aten.rrelu_with_noise(h, torch.empty_like(h), 0.1, 0.3, True, self.own)
            return h.tanh() + 0 * noisy

    net = rg.MomentumNet([Noisy() for _ in range(3)], memory="checkpoint", verify="blocks", fraction_bits=20)
    y = net(torch.randn(4, 8))
    with pytest.raises(rg.ReplayError, match="block 2 did not repeat itself"):
        y.sum().backward()
