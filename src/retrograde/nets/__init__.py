"""The paper's family of networks.

resnet        residual networks for images, plain or with momentum
momentum      Momentum ResNets
coupling      networks whose two streams change each other in turn
revnet        RevNets: coupling with two functions per layer; i-RevNets: coupling from the pixels to the last features
hamiltonian   the limit γ → 1
iresnet       contractive blocks, inverted by iteration
ode           Neural ODEs, augmented and of second order
lista         learning to optimise
relu          blocks that compute relu(x + f(x)), and their f
inverse       the way back from the end of a pass to its input
saved         γ in a state_dict
floats        the networks in floats, for export
checks        checks of arguments

Functions that have the name of their file (`resnet.resnet`) are imported from it.
"""

from .coupling import CoupledState, CouplingNet
from .hamiltonian import HamiltonianBlock, HamiltonianNet
from .iresnet import Certificate, IResNet
from .lista import Lista
from .momentum import MomentumNet, State
from .ode import AugmentedODE, NeuralODE, SecondOrderODE, discretised
from .resnet import ResNet, thin_resnet
from .revnet import IRevNet, RevNet, rev_resnet

__all__ = [
    "AugmentedODE", "Certificate", "CoupledState", "CouplingNet", "HamiltonianBlock", "HamiltonianNet", "IResNet", "IRevNet", "Lista",
    "MomentumNet", "NeuralODE", "ResNet", "RevNet", "SecondOrderODE", "State", "discretised", "rev_resnet",
    "thin_resnet",
]  # fmt: skip
