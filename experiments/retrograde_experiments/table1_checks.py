"""Table 1 of the paper as checks on built networks: what each network claims, and whether that is true.

    inverse             "exact": to the bit · "iterative": by fixed-point iteration, to a certified tolerance ·
                        "numerical": by solving backward, to the solver's tolerance · "none"
    closed form         invert a batch: the error, and the evaluations of f per evaluation in the forward pass. A closed form
                        takes 1; an iteration takes more
    same parameters     load the state_dict of a residual network with as many blocks of the same width
    unconstrained       one plain SGD step, large enough to matter, then invert a batch again

The paper counts a Neural ODE's backward solve as a closed form: it takes one pass, though it is right only to the
solver's tolerance, which the error beside it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import retrograde as rg
from retrograde.nets import (
    AugmentedODE,
    CouplingNet,
    HamiltonianNet,
    IResNet,
    IRevNet,
    MomentumNet,
    NeuralODE,
    ResNet,
    RevNet,
    SecondOrderODE,
)
from retrograde.nets.iresnet import BoundedLinear, invert
from retrograde.nets.revnet import branch as image_branch

WIDTH, DEPTH, BATCH = 8, 6, 16
TOLERANCE = {"exact": 0.0, "iterative": 1e-6, "numerical": 1e-3}  # relative error up to which an inverse is one
PAPER = {  # closed-form inversion, same parameters, unconstrained training
    "Neural ODE": (True, False, True),
    "i-ResNet": (False, True, False),
    "i-RevNet": (True, False, True),
    "RevNet": (True, False, True),
    "Momentum ResNet": (True, True, True),
}


INVERSES = ("exact", "iterative", "numerical", "none")


@dataclass(frozen=True)
class Properties:
    """The columns of the paper's Table 1, as a network claims them."""

    inverse: str
    same_parameters: bool
    unconstrained: bool


DECLARED: dict[type[nn.Module], Properties] = {
    ResNet: Properties("none", same_parameters=True, unconstrained=True),
    MomentumNet: Properties("exact", same_parameters=True, unconstrained=True),
    HamiltonianNet: Properties("exact", same_parameters=True, unconstrained=True),
    CouplingNet: Properties("exact", same_parameters=False, unconstrained=True),
    RevNet: Properties("exact", same_parameters=False, unconstrained=True),
    IRevNet: Properties("exact", same_parameters=False, unconstrained=True),
    IResNet: Properties("iterative", same_parameters=True, unconstrained=False),
    NeuralODE: Properties("numerical", same_parameters=False, unconstrained=True),
    AugmentedODE: Properties("numerical", same_parameters=False, unconstrained=True),
    SecondOrderODE: Properties("numerical", same_parameters=False, unconstrained=True),
}


def properties(net: nn.Module | type[nn.Module]) -> Properties:
    """What a network, or a class of networks, claims. A momentum network with a γ of 0 has no inverse.

    >>> properties(RevNet).inverse
    'exact'
    """
    kind = net if isinstance(net, type) else type(net)
    found = next((DECLARED[base] for base in kind.__mro__ if base in DECLARED), None)
    if found is None:
        raise TypeError(f"{kind.__name__} is not of the family: {', '.join(c.__name__ for c in DECLARED)}.")
    if isinstance(net, MomentumNet) and 0 in (net.gamma if isinstance(net.gamma, tuple) else (net.gamma,)):
        return Properties("none", found.same_parameters, found.unconstrained)
    return found


@dataclass(frozen=True)
class Row:
    """One network: what was found, what it declares, what the paper says (None: not in its table)."""

    network: str
    error: float  # ‖recovered − x‖ / ‖x‖; NaN where there is no inverse
    evaluations: float  # of f in the inverse, per evaluation in the forward pass
    found: tuple[bool, bool, bool | None]
    declared: Properties
    paper: tuple[bool, bool, bool] | None

    @property
    def agrees(self) -> bool:
        """Whether the checks bear out what the network declares, and the paper."""
        closed, same, free = self.found
        claims = (self.declared.inverse in ("exact", "numerical"), self.declared.same_parameters)
        right = (closed, same) == claims and (free is None or free == self.declared.unconstrained)
        return right and (self.paper is None or self.found == self.paper)


@dataclass(frozen=True)
class Case:
    """How to build a network, what of it a residual network's parameters go to, and how to invert it."""

    kind: type[nn.Module]
    make: Callable[[list[nn.Module]], Any]
    holder: Callable[[Any], nn.Module]
    recover: Callable[[Any, Tensor], Tensor] | None  # x ↦ x, through the network and back
    x: Callable[[], Tensor] = lambda: torch.randn(BATCH, WIDTH).double()
    residual: Callable[[], nn.Module] = lambda: branch()  # a block of the residual network of that size
    unconstrained: Callable[[Any, Tensor], Tensor] | None = (
        None  # as recover, with a constraint on the weights left out
    )


def branch(width: int = WIDTH) -> nn.Sequential:
    """f, with as many parameters in every network here."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)).double()


def _through_state(net: Any, x: Tensor) -> Tensor:
    return net.inverse(net.encode(x))


def _without_constraint(net: IResNet, x: Tensor) -> Tensor:
    """Through x + g(x) with the weights as they are, and back by fixed-point iteration as if Lip(g) were still c."""
    plain = [nn.Sequential(*map(_raw, g.children())) for g in net.blocks]
    y = x
    for g in plain:
        y = y + g(y)
    for g in reversed(plain):
        y, _ = invert(g, y, net.coefficient, 1e-9)
    return y


@torch.no_grad()
def _obey(net: IResNet) -> None:
    """Let the weights themselves satisfy the constraint."""
    for layer in net.modules():
        if isinstance(layer, BoundedLinear):
            layer.weight.copy_(layer.bounded())


def _raw(layer: Any) -> nn.Module:
    if not isinstance(layer, nn.Linear):
        return layer
    plain = nn.Linear(layer.in_features, layer.out_features).double()
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if name in ("weight", "bias")})
    return plain


CASES: dict[str, Case] = {
    "ResNet": Case(ResNet, lambda f: MomentumNet(f, 0), lambda net: net.blocks, None),
    "Neural ODE": Case(
        NeuralODE, lambda f: NeuralODE(f[0], solver="rk4", steps=20), lambda net: net.f, lambda net, x: net.inverse(net(x))
    ),
    "second-order ODE": Case(
        SecondOrderODE, lambda f: SecondOrderODE(f[0], solver="rk4", steps=20), lambda net: net.f, _through_state
    ),
    "i-ResNet": Case(
        IResNet, lambda f: IResNet(f).eval(), lambda net: net.blocks, lambda net, x: net.inverse(net(x))[0],
        unconstrained=_without_constraint,
    ),
    "i-RevNet": Case(
        IRevNet, lambda f: IRevNet([2, 1], channels=1).eval(), lambda net: net.couplings.blocks, _through_state,
        x=lambda: torch.randint(256, (BATCH, 1, 8, 8)) / 256, residual=lambda: image_branch(4, 4),
    ),
    "RevNet": Case(
        RevNet, lambda f: RevNet(*([branch(WIDTH // 2) for _ in f[::2]] for _ in range(2))), lambda net: net.blocks, _through_state
    ),
    "Hamiltonian": Case(
        HamiltonianNet, lambda f: HamiltonianNet(f, 0.5), lambda net: nn.ModuleList(b.f for b in net.blocks), _through_state
    ),
    "Momentum ResNet": Case(MomentumNet, MomentumNet, lambda net: net.blocks, _through_state),
}  # fmt: skip


def table1(names: tuple[str, ...] = tuple(CASES), seed: int = 0) -> tuple[Row, ...]:
    """Build each network and check each property."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise ValueError(f"no network is called {unknown[0]!r}; there are {', '.join(CASES)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return tuple(check(name) for name in names)


def check(name: str) -> Row:
    """Check the properties of one network."""
    case = CASES[name]
    net, declared = case.make([branch() for _ in range(DEPTH)]), DECLARED[case.kind]
    same = _takes(case.holder(net), nn.ModuleList(case.residual() for _ in range(DEPTH)))
    error, evaluations, free = float("nan"), float("nan"), None
    if case.recover is not None:
        x = case.x()
        error, evaluations = _inverted(case, case.recover, net, x)
        free = _still_inverts(case, net, x, TOLERANCE[declared.inverse])
    good = declared.inverse != "none" and error <= TOLERANCE[declared.inverse]
    return Row(name, error, evaluations, (good and evaluations == 1, same, free), declared, PAPER.get(name))


def _takes(holder: nn.Module, residual: nn.Module) -> bool:
    try:
        holder.load_state_dict(residual.state_dict())
    except RuntimeError:
        return False
    return True


@torch.no_grad()
def _inverted(case: Case, recover: Callable[[Any, Tensor], Tensor], net: Any, x: Tensor) -> tuple[float, float]:
    """The error of the inverse, and how often it evaluates f, against the forward pass alone."""
    with suppress(rg.RangeOverflow):  # the weights may have grown: the range is then calibrated anew
        net(x)
    exact = net.encode(x).fixed if case.kind not in (NeuralODE, SecondOrderODE, IResNet) else None
    x = x if exact is None else exact.decode(exact.encode(x), x.dtype)  # as fixed point holds it
    with _counted() as calls:
        (net.encode if hasattr(net, "encode") else net)(x)
        forward = calls[0]
        back = recover(net, x)
        inverse = calls[0] - 2 * forward
    if case.kind is IResNet:  # each block also runs once to bring its bounds up to date
        inverse -= len(net.blocks)
    return float((back - x).norm() / x.norm()), inverse / forward


def _still_inverts(case: Case, net: Any, x: Tensor, tolerance: float) -> bool:
    """Take a plain SGD step that makes the weights grow (of norm 10: about double), and invert a batch again."""
    recover = case.unconstrained or case.recover
    assert recover is not None
    if case.unconstrained is not None:
        _obey(net)
        assert float((recover(net, x) - x).norm() / x.norm()) <= tolerance  # before the step it does invert
    y = net(x)
    (-y.square().sum() / len(y)).backward()
    size = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    torch.optim.SGD(net.parameters(), lr=float(10 / size)).step()
    try:
        if case.unconstrained is None:
            return _inverted(case, recover, net, x)[0] <= tolerance
        return float((recover(net, x) - x).norm() / x.norm()) <= tolerance
    except ArithmeticError:
        return False


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count evaluations of f, by those of its activation."""
    calls = [0]

    def count(module: nn.Module, args: Any, output: Any) -> None:
        calls[0] += isinstance(module, nn.Tanh | nn.ReLU)

    handle = register_module_forward_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


def render(rows: tuple[Row, ...]) -> str:
    """The rows as an aligned table: what was found, and the paper's in brackets."""
    head = ["network", "inverse", "error", "f per f", "closed form", "same parameters", "unconstrained"]
    words = {True: "yes", False: "no", None: "–"}
    lines = [head]
    for row in rows:
        paper = [f" ({words[p]})" for p in row.paper] if row.paper else [""] * 3
        marks = [words[found] + said for found, said in zip(row.found, paper, strict=True)]
        figures = (
            ["–", "–"]
            if row.error != row.error
            else [f"{row.error:.0e}" if row.error else "0", f"{row.evaluations:.3g}"]
        )
        lines.append([row.network, row.declared.inverse, *figures, *marks])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
