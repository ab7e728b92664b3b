"""What momentum networks can represent: the theory of [sander2021], executable, in float64.

Functions take NumPy arrays or torch tensors and return the same kind. Nothing is imported before it is used, so that
`import retrograde.theory` works without SciPy; using it then says what to install.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograde.theory.construct import represent as represent
    from retrograde.theory.fixed_points import is_attracting as is_attracting
    from retrograde.theory.fixed_points import momentum_jacobian as momentum_jacobian
    from retrograde.theory.fixed_points import revnet_eigenvalue as revnet_eigenvalue
    from retrograde.theory.fixed_points import revnet_jacobian as revnet_jacobian
    from retrograde.theory.fixed_points import spectral_radius as spectral_radius
    from retrograde.theory.flow import linear_flow as linear_flow
    from retrograde.theory.flow import psi as psi
    from retrograde.theory.limits import damped_flow as damped_flow
    from retrograde.theory.limits import first_order_flow as first_order_flow
    from retrograde.theory.limits import first_order_gap as first_order_gap
    from retrograde.theory.limits import frictionless_flow as frictionless_flow
    from retrograde.theory.limits import frictionless_gap as frictionless_gap
    from retrograde.theory.limits import second_order_flow as second_order_flow
    from retrograde.theory.representable import is_representable as is_representable
    from retrograde.theory.representable import largest_multiple as largest_multiple
    from retrograde.theory.representable import obstacles as obstacles
    from retrograde.theory.spectrum import G as G
    from retrograde.theory.spectrum import lambda_min as lambda_min
    from retrograde.theory.spectrum import minimiser as minimiser
    from retrograde.theory.spectrum import minimising_parameter as minimising_parameter
    from retrograde.theory.universality import crossing as crossing
    from retrograde.theory.universality import embed_first_order as embed_first_order
    from retrograde.theory.universality import negative_pair as negative_pair
    from retrograde.theory.universality import obstruction as obstruction
    from retrograde.theory.universality import sign_flip as sign_flip
    from retrograde.theory.universality import universal_velocity as universal_velocity

_HOME = {
    "construct": ("represent",),
    "fixed_points": (
        "is_attracting", "momentum_jacobian", "revnet_eigenvalue", "revnet_jacobian", "spectral_radius",
    ),
    "flow": ("linear_flow", "psi"),
    "limits": (
        "damped_flow", "first_order_flow", "first_order_gap", "frictionless_flow", "frictionless_gap",
        "second_order_flow",
    ),
    "representable": ("is_representable", "largest_multiple", "obstacles"),
    "spectrum": ("G", "lambda_min", "minimiser", "minimising_parameter"),
    "universality": (
        "crossing", "embed_first_order", "negative_pair", "obstruction", "sign_flip", "universal_velocity",
    ),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULE[name]}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("numpy", "scipy"):
            raise ImportError(
                f'retrograde.theory.{name} needs {error.name}: pip install "retrograde[theory]"', name=error.name
            ) from error
        raise
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
