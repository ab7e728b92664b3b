"""What all networks of the family have in common: bits of stored activations, exact inverses, flat memory, training, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from problems import Mlp, conv, fitted, same_in_every_mode
from retrograde.memory import held_bytes
from retrograde.nets import (
    AugmentedODE,
    CouplingNet,
    HamiltonianBlock,
    HamiltonianNet,
    IResNet,
    IRevNet,
    Lista,
    NeuralODE,
    RevNet,
    SecondOrderODE,
    rev_resnet,
    thin_resnet,
)
from retrograde.nets.iresnet import invert
from retrograde.nets.lista import dictionary
from retrograde.nets.resnet import resnet

DICTIONARY = dictionary(4, 6, generator=torch.Generator().manual_seed(0))
GRID = rg.FixedPoint(20, torch.int32)
NARROW = rg.FixedPoint(28, torch.int32)


def hamiltonian(depth: int = 3, step: float = 0.3, kernel: int | None = None, **options: Any) -> HamiltonianNet:
    return HamiltonianNet([HamiltonianBlock(8, 5, kernel) for _ in range(depth)], step, **options)


def revnet(depth: int = 3, make: Callable[[], nn.Module] = lambda: Mlp(4, 6), **options: Any) -> RevNet:
    return RevNet([make() for _ in range(depth)], [make() for _ in range(depth)], **options)


def squeezing(**options: Any) -> CouplingNet:
    return CouplingNet([conv(2), conv(2), conv(8), conv(8), conv(8)], squeezes=[1, 2, 1, 1, 2], **options)


def irevnet(stages: tuple[int, ...] = (2, 2), **options: Any) -> IRevNet:
    return IRevNet(stages, **{"channels": 3, "classes": 4, **options})


@dataclass(frozen=True)
class Relative:
    """A network with options, and the input that it takes."""

    make: Callable[..., nn.Module]
    shape: tuple[int, ...]
    format: torch.memory_format = torch.contiguous_format


IMAGES, LAST = (2, 4, 5, 5), torch.channels_last
RELATIVES = {
    **{f"hamiltonian, depth {d}": Relative(lambda d=d, **o: hamiltonian(d, **o), (3, 8)) for d in (1, 40)},
    "hamiltonian from f(x)": Relative(lambda **o: hamiltonian(velocity="first", **o), (3, 8)),
    "hamiltonian from a module": Relative(lambda **o: hamiltonian(velocity=nn.Linear(8, 8), **o), (3, 8)),
    "hamiltonian of images": Relative(lambda **o: hamiltonian(6, kernel=3, **o), (2, 8, 5, 5)),
    **{f"revnet, depth {d}": Relative(lambda d=d, **o: revnet(d, **o), (3, 8)) for d in (1, 30)},
    "revnet, last dimension": Relative(lambda **o: revnet(dim=-1, **o), (2, 5, 8)),
    "revnet of images": Relative(lambda **o: revnet(10, lambda: conv(2), **o), IMAGES),
    "revnet of images, channels last": Relative(lambda **o: revnet(3, lambda: conv(2), **o), IMAGES, LAST),
    "squeezing coupling": Relative(squeezing, (2, 4, 8, 8), LAST),
    "i-revnet": Relative(irevnet, (2, 3, 8, 8)),
    "lista": Relative(lambda **o: Lista(DICTIONARY, 0.1, 12, "momentum", **o), (8, 4)),
    "lista, revnet": Relative(lambda **o: Lista(DICTIONARY, 0.1, 12, "revnet", **o), (8, 4)),
    "resnet": Relative(lambda **o: thin_resnet(20, gamma=0.9, **o), (2, 3, 8, 8)),
    "resnet from f(x)": Relative(lambda **o: thin_resnet(20, gamma=0.9, velocity="first", **o), (2, 3, 8, 8)),
    "resnet from a learned v": Relative(lambda **o: thin_resnet(20, gamma=0.9, velocity="learned", **o), (2, 3, 8, 8)),
    "resnet, the paper's": Relative(lambda **o: thin_resnet(20, residual="branch", gamma=0.9, **o), (2, 3, 8, 8)),
    "resnet with revnets": Relative(lambda **o: rev_resnet(18, size="cifar", classes=3, **o), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("verify", ["off", "strict"])
@pytest.mark.parametrize("name", RELATIVES)
def test_gradients_are_those_of_stored_activations(name: str, verify: str) -> None:
    case = RELATIVES[name]
    net = case.make(verify=verify)
    x = torch.randn(case.shape).contiguous(memory_format=case.format).requires_grad_()
    found = same_in_every_mode(net, x)
    assert all(g.isfinite().all() for g in found.values())
    assert found["input"].any()
    silent = [name for name, p in net.named_parameters() if not found[name].any()]
    assert len(silent) < 3, silent  # of an untrained Lista the first W1 meets zeros


@pytest.mark.parametrize(
    "net", [revnet(5), squeezing(), hamiltonian(velocity="first")], ids=["revnet", "squeezing", "hamiltonian"]
)
def test_gradients_in_float64_are_those_of_finite_differences(net: Any) -> None:
    shape = (2, 4, 8, 8) if net.blocks[0].__class__ is nn.Sequential else (2, 8)
    net, x = net.double().eval(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    net.memory = "reverse"
    net(x)
    assert torch.autograd.gradcheck(net, (x,), fast_mode=True)


@pytest.mark.parametrize("depth", [1, 50, 1_000])
@pytest.mark.parametrize("kind", ["hamiltonian", "revnet"])
def test_inverse_recovers_the_input_bit_for_bit(kind: str, depth: int) -> None:
    phi, psi = Mlp(4, 6), Mlp(4, 6)
    for block in (phi, psi):
        block.outer.weight.data /= depth
    net: Any = (
        RevNet([phi] * depth, [psi] * depth)
        if kind == "revnet"
        else HamiltonianNet([HamiltonianBlock(8)] * depth, 0.05)
    )
    x = torch.randn(3, 8)
    state = net.encode(x)
    assert not torch.equal(state.x, x)
    assert torch.equal(net.inverse(state), state.fixed.decode(state.fixed.encode(x), x.dtype))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("stages", "first", "padding", "size"), [([3], 2, 0, 6), ([2, 3, 2], 2, 0, 8), ([2, 1], 1, 5, 4), ([2, 2], 4, 2, 8)]
)
def test_images_come_back_bit_for_bit(training: bool, stages: list[int], first: int, padding: int, size: int) -> None:
    net = IRevNet(stages, channels=3, classes=4, first=first, padding=padding).train(training)
    image = torch.randint(256, (2, 3, size, size)) / 256
    state = net.encode(image)
    assert state.x.shape[1] == (3 * first**2 + padding) * 4 ** (len(stages) - 1)
    assert torch.equal(net.inverse(state), image)


@pytest.mark.parametrize(
    ("net", "shape"), [(squeezing(), (2, 4, 8, 8)), (irevnet((6, 16, 12), channels=1), (2, 1, 16, 16))]
)
def test_other_floats_come_back_as_fixed_point_holds_them(net: Any, shape: tuple[int, ...]) -> None:
    x, net = torch.randn(shape).contiguous(memory_format=LAST), net.eval()
    state = net.encode(x)
    back = net.inverse(state)
    assert torch.equal(back, state.fixed.decode(state.fixed.encode(x), x.dtype))
    assert (back - x).abs().max() <= 2.0 ** -(state.fixed.bits + 1)


@pytest.mark.parametrize(
    ("make", "floats"),
    [
        (lambda depth, **o: RevNet([Mlp(4, 4)] * depth, [Mlp(4, 4)] * depth, **o), 1),
        (lambda depth, **o: HamiltonianNet([HamiltonianBlock(8)] * depth, 0.1, **o), 2),
    ],
    ids=["revnet", "hamiltonian"],
)
def test_bytes_held_do_not_grow_with_depth(make: Callable[..., nn.Module], floats: int) -> None:
    """Reverse: both streams, or x and v, and no buffer. Store: every activation, so the same test fails for it."""
    x, slope = torch.randn(4_096, 8), {}
    for memory in ("reverse", "checkpoint", "store"):
        nets = [make(depth, memory=memory, fixed_point=GRID) for depth in (10, 30)]
        held = [held_bytes(lambda net=net: net(x).sum()) / x.numel() for net in nets]
        slope[memory] = (held[1] - held[0]) / 20
        if memory == "reverse":
            assert 4 * floats <= held[1] < 4 * floats + 0.5
    assert slope["reverse"] < 0.01
    assert slope["checkpoint"] == pytest.approx(4, abs=0.1)
    assert slope["store"] > 7


# training ----------------------------------------------------------------------------------------------------------------


def near(target: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: (y - target).square().mean()


def trained_resnet(**options: Any) -> Any:
    y = torch.arange(16) % 2
    return thin_resnet(20, classes=2, **options), torch.randn(16, 3, 8, 8), lambda z: F.cross_entropy(z, y)


def trained_hamiltonian() -> Any:
    x = torch.randn(128, 2)
    blocks = [HamiltonianBlock(2, 8) for _ in range(10)]
    net = HamiltonianNet(blocks, 0.3, velocity=nn.Linear(2, 2), memory="reverse")
    return net, x, near(torch.stack([x[:, 1], -x[:, 0]], 1))


def trained_revnet() -> Any:
    x = torch.randn(64, 8)
    return revnet(4, memory="reverse", verify="strict"), x, near(x.roll(1, 1).sin())


def trained_irevnet() -> Any:
    image = torch.randint(256, (32, 1, 8, 8)) / 256
    label = (image[:, 0, :4].mean((1, 2)) > image[:, 0, 4:].mean((1, 2))).long()
    net = IRevNet([2, 2], channels=1, classes=2, memory="reverse", verify="strict")
    return net, image, lambda z: F.cross_entropy(z, label)


def trained_iresnet() -> Any:
    x = torch.randn(64, 2)
    blocks = [nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2)) for _ in range(6)]
    return IResNet(blocks, coefficient=0.8), x, near(x * 1.5 + x.sin())


@pytest.mark.parametrize(
    ("problem", "rate", "steps", "falls"),
    [
        (trained_hamiltonian, 2e-2, 80, 10), (trained_revnet, 1e-2, 60, 3), (trained_iresnet, 2e-2, 40, 5),
        (trained_irevnet, 1e-2, 25, 5), (trained_resnet, 1e-2, 12, 3),
        (lambda: trained_resnet(gamma=0.9, memory="reverse"), 1e-2, 12, 3),
    ],
)  # fmt: skip
def test_it_trains_and_still_inverts(problem: Callable[[], Any], rate: float, steps: int, falls: float) -> None:
    net, x, loss = problem()
    losses = fitted(net, lambda: loss(net(x)), rate, steps)
    assert losses[-1] < losses[0] / falls
    net.eval()
    if isinstance(net, IRevNet):
        assert torch.equal(net.inverse(net.encode(x)), x)
    if isinstance(net, IResNet):
        assert (net.inverse(net(x).detach())[0] - x).norm() / x.norm() <= 1e-6


# wrong input -------------------------------------------------------------------------------------------------------------


def dense(width: int = 6, factor: float = 1.0) -> nn.Sequential:
    g = nn.Sequential(nn.Linear(width, 10), nn.Tanh(), nn.Linear(10, width))
    for p in g.parameters():
        p.data *= factor
    return g


ODE = nn.Linear(3, 3)
NAN = float("nan")
WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((lambda h=h: HamiltonianNet([Mlp()], h), ValueError, "step must be above 0") for h in (0, -1.0, NAN, math.inf)),
    (lambda: HamiltonianNet([Mlp()], "0.1"), TypeError, "step must be a number"),
    (lambda: HamiltonianBlock(3, kernel=4), ValueError, "kernel must be odd"),
    (lambda: (net := HamiltonianNet([Mlp()])).energy(net.encode(torch.ones(1, 8))), TypeError, "no potential"),
    (lambda: RevNet([Mlp()] * 2, [Mlp()] * 3), ValueError, "2 phi and 3 psi"),
    (lambda: revnet(memory="magic"), ValueError, "memory must be one of"),
    (lambda: RevNet([], []), ValueError, "at least one block"),
    (lambda: revnet()(torch.ones(2, 8, dtype=torch.int64)), TypeError, "floating-point tensor"),
    (lambda: revnet()(torch.full((2, 8), NAN)), rg.RangeOverflow, "NaN or Inf in the input"),
    (lambda: revnet(fixed_point=NARROW)(torch.full((2, 8), 5.0)), rg.RangeOverflow, r"beyond .*28 fraction bits"),
    (lambda: RevNet([nn.Linear(4, 3)], [nn.Linear(4, 4)])(torch.ones(2, 8)), ValueError, "turned a"),
    *((lambda s=s: revnet()(torch.ones(s)), ValueError, "even number of channels there; got .* Pad a channel")
      for s in [(2, 7), (2,), ()]),
    (lambda: CouplingNet([conv(2)], squeezes=[2])(torch.ones(1, 4, 5, 4)), ValueError, "divisible by 2"),
    (lambda: CouplingNet([conv(2)], squeezes=[2, 1]), ValueError, "one whole number"),
    (lambda: revnet(2).inverse(revnet(3).encode(torch.ones(2, 8))), ValueError, "6 blocks, against 4 blocks"),
    (lambda: revnet().inverse(revnet().encode(torch.ones(2, 8))), ValueError, "did not rewind"),
    (lambda: revnet().inverse(torch.ones(2, 8)), ValueError, "not a state"),
    (lambda: IRevNet([1], channels=3, first=3), ValueError, "27, which is odd"),
    (lambda: IRevNet([]), ValueError, "stages is empty"),
    (lambda: irevnet()(torch.ones(1, 1, 8, 8)), ValueError, r"\(N, 3, H, W\); got \(1, 1, 8, 8\)"),
    (lambda: irevnet()(torch.ones(1, 3, 6, 6)), ValueError, "divisible by 2"),
    (lambda: irevnet()(torch.full((1, 3, 4, 4), NAN)), rg.RangeOverflow, "NaN"),
    (lambda: irevnet()(torch.ones(1, 3, 4, 4, dtype=torch.uint8)), TypeError, "floating-point"),
    *((lambda c=c: IResNet([dense()], c), ValueError, r"above 0 and below 1; got .*0.9 is a common choice")
      for c in (1, 1.5, 0, -0.1, NAN)),
    (lambda: IResNet([dense(), nn.Sequential(nn.BatchNorm2d(3))]), TypeError, r"block 1 holds a BatchNorm2d.*no normalisation"),
    (lambda: IResNet([nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2))]), ValueError, "groups=1"),
    (lambda: IResNet([dense()])(torch.full((2, 6), NAN)), ValueError, "12 values of 12 that are NaN"),
    (lambda: IResNet([dense()]).inverse(torch.tensor([[0.0] * 5 + [math.inf]])), ValueError, "the output to invert has 1 values"),
    (lambda: IResNet([dense()]).inverse(torch.zeros(1, 6), tolerance=0), ValueError, "tolerance"),
    (lambda: invert(dense(factor=5.0), torch.randn(1, 6), 0.5, 1e-6), ArithmeticError, r"does not contract as its bound of 0\.5 says"),
    (lambda: Lista(DICTIONARY, 0.1, 3, form="lista"), ValueError, "form must be one of 'resnet', 'momentum', 'revnet'"),
    (lambda: Lista(DICTIONARY, 0.1, 3)(torch.ones(2, 6)), ValueError, r"y must be \(N, 4\).*got \(2, 6\)"),
    (lambda: Lista(DICTIONARY, 0.0, 3), ValueError, "lam must be above 0"),
    (lambda: Lista(DICTIONARY, 0.1, 0), ValueError, "depth must be a whole number from 1"),
    (lambda: Lista(torch.ones(3), 0.1, 3), ValueError, "D must be a matrix"),
    (lambda: Lista(DICTIONARY * NAN, 0.1, 3), ValueError, "D has 24 values of 24"),
    (lambda: Lista(DICTIONARY, 0.1, 3)(torch.full((2, 4), NAN)), ValueError, "y has 8 values of 8"),
    *((lambda e=e: SecondOrderODE(ODE, e), ValueError, "eps must be above 0") for e in (0, -1, NAN, math.inf)),
    (lambda: NeuralODE(ODE, solver="newton"), ValueError, r"solver must be one of 'dopri8'.*; got 'newton'"),
    (lambda: NeuralODE(ODE, gradient="magic"), ValueError, "gradient must be one of 'adjoint', 'direct'"),
    (lambda: NeuralODE(ODE, steps=3), ValueError, "steps is for solvers of a fixed step"),
    (lambda: SecondOrderODE(ODE, velocity="fast"), ValueError, "velocity"),
    (lambda: NeuralODE(ODE)(torch.tensor([[1.0, 2.0, NAN]] * 2)), ValueError, "2 values of 6 that are NaN"),
    (lambda: NeuralODE(ODE, horizon=0), ValueError, "horizon"),
    (lambda: AugmentedODE(ODE, 1)(torch.ones(2)), ValueError, "channels along dim 1"),
    (lambda: NeuralODE(lambda x: x), TypeError, r"f must be an nn\.Module"),
    *((lambda v=v: SecondOrderODE(Mlp(3, 5), 0.7).encode(torch.zeros(4, 3), v), ValueError, "shape, dtype and device of x")
      for v in (torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.float64))),
    (lambda: SecondOrderODE(Mlp(3, 5)).encode(torch.zeros(4, 3), torch.full((4, 3), NAN)), ValueError, "v has 12 values of 12"),
    (lambda: resnet(20), ValueError, "depth must be one of 18, 34, 50, 101, 152; got 20"),
    (lambda: thin_resnet(1201), ValueError, r"got 1201.*Near it are 1196, 1199, 1202, 1208"),
    (lambda: thin_resnet(20, block="wide"), ValueError, "block must be one of"),
    (lambda: thin_resnet(2), ValueError, "got 2"),
    (lambda: resnet(18, memory="reverse"), ValueError, "memory are options of momentum stages"),
    (lambda: thin_resnet(20, gamma=1.5), ValueError, "gamma"),
    (lambda: resnet(18, size="mnist"), ValueError, "size must be one of"),
    (lambda: thin_resnet(20, gamma=0.9, form="branch"), ValueError, "form must be one of 'block', 'relu'; got 'branch'"),
    (lambda: thin_resnet(20, gamma=1, factor=0.0), ValueError, "factor is for residual='branch'"),
    (lambda: thin_resnet(20, residual="branch", gamma=0.9, form="block"), ValueError, "have one form"),
    (lambda: thin_resnet(20, residual="sum"), ValueError, "residual must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("act", "error", "message"), WRONG, ids=[f"{k} {message[:30]}" for k, (*_, message) in enumerate(WRONG)]
)
def test_wrong_input(act: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


def test_beyond_the_range_is_nan_where_it_is_asked_for() -> None:
    assert revnet(fixed_point=NARROW, overflow="nan")(torch.full((2, 8), 5.0)).isnan().all()
