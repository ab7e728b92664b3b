"""The theory of momentum networks [sander2021], executable, in float64.

inputs          checks of arguments
flow            Ψ_ε, the map that a linear second-order model defines
scalar          Ψ_ε of one number: its minimum λ_ε and its inverse
jordan          Jordan structure at a tolerance
representable   which matrices are Ψ_ε(θ)
construct       θ from the matrix
propositions    fixed points, limits in ε, and what second-order models can do beyond first-order ones

Functions take NumPy arrays, torch tensors or nested lists. Matrices come back as the kind that was given. An argument that is not
allowed raises ValueError or TypeError, with its name, what was given and what is expected.
"""

try:
    from .construct import represent
    from .flow import linear_flow, psi
    from .propositions import (
        crossing,
        damped_flow,
        embed_first_order,
        first_order_flow,
        first_order_gap,
        frictionless_flow,
        frictionless_gap,
        is_attracting,
        momentum_jacobian,
        negative_pair,
        obstruction,
        revnet_eigenvalue,
        revnet_jacobian,
        second_order_flow,
        sign_flip,
        spectral_radius,
        universal_velocity,
    )
    from .representable import is_representable, largest_multiple, obstacles
    from .scalar import G, lambda_min, minimiser, minimising_parameter
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("numpy", "scipy"):
        raise
    raise ImportError(
        f'retrograde.theory needs {error.name}: pip install "retrograde[theory]"', name=error.name
    ) from error

__all__ = [
    "G", "crossing", "damped_flow", "embed_first_order", "first_order_flow", "first_order_gap", "frictionless_flow",
    "frictionless_gap", "is_attracting", "is_representable", "lambda_min", "largest_multiple", "linear_flow", "minimiser",
    "minimising_parameter", "momentum_jacobian", "negative_pair", "obstacles", "obstruction", "psi", "represent",
    "revnet_eigenvalue", "revnet_jacobian", "second_order_flow", "sign_flip", "spectral_radius", "universal_velocity",
]  # fmt: skip
