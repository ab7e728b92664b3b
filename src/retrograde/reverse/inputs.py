"""What a network can be given, and what it can be run under: everything else is refused here, by name.

The integers of the state are moved in place by bodies that neither tracers nor function transforms see, so a trace
would hold uninitialised memory and a forward-mode derivative would be lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from .extra import exporting, unusual


def check_input(x: Any, what: str = "the input") -> None:
    """Refuse what the state cannot be made of."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = f"a tensor of dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        advice = (
            " Pass its real and imaginary parts (torch.view_as_real)."
            if isinstance(x, Tensor) and x.is_complex()
            else ""
        )
        raise TypeError(f"{what} must be a floating-point tensor; got {given}.{advice}")
    if x.is_nested or x.layout is not torch.strided:
        kind, advice = (
            ("nested", "to_padded_tensor(0.0), with a mask") if x.is_nested else (str(x.layout), "to_dense()")
        )
        raise TypeError(f"{what} must be a dense floating-point tensor; got a {kind} one. Pass x.{advice}.")


def refuse_meta() -> None:
    """Raise, because a tensor without values would be trained on."""
    raise TypeError(
        "a meta tensor has no values, by which the range of this network could be found. rg.plan predicts memory without "
        "them, under torch.no_grad() there is an output without them; else move the model and its input to a device."
    )


def check_surroundings() -> None:
    """Refuse function transforms, forward-mode derivatives and tracers."""
    if unusual():
        _refuse_surroundings()


def _refuse_surroundings() -> None:
    check_transforms()
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode derivatives (torch.autograd.forward_ad) do not see through the integer state of this network. Use "
            "torch.autograd.functional.jvp, which takes two backward passes, or run the network outside of dual_level()."
        )
    tracer = "torch.jit.trace" if torch.jit.is_tracing() else "torch.export" if exporting() else "make_fx"
    raise RuntimeError(
        f"{tracer} does not see through the integer state of this network. For export, write its recurrence out in floats, as a "
        "loop over the blocks (of a momentum network: v = gamma * v + (1 - gamma) * f(x); x = x + v), which agrees up to "
        "rounding. To run faster, use torch.compile, which leaves the steps as they are."
    )


def check_transforms() -> None:
    """Refuse function transforms."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.func's transforms (vmap, grad, jvp) do not see through the integer state of this network. Use torch.autograd "
            "instead: torch.autograd.grad, or a loop over samples; torch.func.functional_call alone works."
        )


def check_output(y: Any, x: Tensor, name: str) -> Any:
    """y, if it is like x in shape, device and dtype (under autocast its dtype may differ)."""
    if isinstance(y, FakeTensor) and not isinstance(x, FakeTensor):
        raise TypeError(
            f"{name} returned a tensor without values: it has one from the step in which memory was planned, kept outside of "
            "its module. Keep it as a buffer, or convert without a budget."
        )
    if isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype and y.device == x.device:
        return y
    if not isinstance(y, Tensor):
        raise TypeError(f"{name} returned {type(y).__name__}; it must return one tensor like its input.")
    free = y.is_floating_point() and torch.is_autocast_enabled(x.device.type)
    if y.shape != x.shape or y.device != x.device or (y.dtype != x.dtype and not free):
        raise ValueError(
            f"{name} turned a {tuple(x.shape)} {x.dtype} tensor on {x.device} into a {tuple(y.shape)} {y.dtype} "
            f"tensor on {y.device}. Blocks of a momentum network must keep all three: leave others outside of it."
        )
    return y


def any_output(y: Any, x: Tensor, name: str) -> Any:
    """y, whatever it is: of a block that is in no stage."""
    return y
