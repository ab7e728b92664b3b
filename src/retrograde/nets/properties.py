"""What sets the networks of the family apart: how each is inverted, whose parameters it takes, how it may be trained.

    inverse             "exact": to the bit · "iterative": by fixed-point iteration, to a certified tolerance ·
                        "numerical": by solving backward, to the solver's tolerance · "none"
    same_parameters     a residual network's state_dict fits, block by block
    unconstrained       plain gradient steps keep it invertible

`table1` builds each network and checks what is declared here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .coupling import CouplingNet
from .hamiltonian import HamiltonianNet
from .iresnet import IResNet
from .irevnet import IRevNet
from .momentum import MomentumNet
from .ode import AugmentedODE, NeuralODE, SecondOrderODE
from .resnet import ResNet
from .revnet import RevNet

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
    if isinstance(net, MomentumNet) and net.recurrence.plain:
        return Properties("none", found.same_parameters, found.unconstrained)
    return found
