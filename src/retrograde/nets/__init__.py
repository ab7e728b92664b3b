"""The paper's family of networks, one file each.

resnet        residual networks for images, plain or with momentum
momentum      Momentum ResNets
coupling      two streams that move each other; revnet, irevnet: made of it
hamiltonian   the limit γ → 1
iresnet       contractive blocks, inverted by iteration; spectral: the bounds
ode           Neural ODEs, augmented and of second order; agreement: their discrete counterparts
lista         learning to optimise
properties    how each is inverted and trained; table1 checks it
"""

from importlib import import_module
from typing import Any

_HOMES = {  # loaded when first asked for; functions with the name of their file are imported from it
    "agreement": ("Agreement", "discretised"),
    "coupling": ("CoupledState", "CouplingNet"),
    "hamiltonian": ("HamiltonianBlock", "HamiltonianNet"),
    "iresnet": ("Certificate", "IResNet"),
    "irevnet": ("IRevNet",),
    "lista": ("Lista",),
    "momentum": ("MomentumNet", "State"),
    "ode": ("AugmentedODE", "NeuralODE", "SecondOrderODE"),
    "properties": ("Properties",),
    "resnet": ("ResNet", "momentum_resnet", "thin_resnet"),
    "revnet": ("RevNet", "rev_resnet"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
