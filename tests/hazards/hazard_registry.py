"""What a hazard is, and how a contender is judged on it.

A hazard is a small method of a `Theme`, and its docstring is its line in the table. It makes a network of the blocks it is
about, trains a step with it and returns what it found (outputs, gradients, buffers, the next random number). It is run twice
on the same seeds: with stored activations, which is the truth, and with the contender's way of saving memory.

    right    the same bits                         near     right to the rounding of the contender's inversion
    wrong    another gradient, and no error        raises   an error
    cannot   the contender has no way to say it
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hazard_blocks import batch
from torch import Tensor, nn

Found = dict[str, Tensor]
NEAR = 1e-3
FIXED_POINT = 0.02  # relative error, against plain floats, that is still put down to the rounding of fixed point


class CannotExpress(Exception):
    """The contender has no way to say this."""


class Contender:
    """A way to train residual blocks without storing their activations, and its own network with stored ones."""

    name: str
    truth = ""
    """What its networks with stored tensors are called, where other contenders have the same: they are run once for all of them."""

    def net(self, blocks: Sequence[nn.Module], stored: bool, **options: Any) -> nn.Module:
        raise NotImplementedError

    def plain(self, blocks: Sequence[nn.Module], **options: Any) -> nn.Module | None:
        """The same network in plain floats, if that is not what `stored` already is."""
        return None


@dataclass(frozen=True)
class Hazard:
    """One thing that could go wrong."""

    name: str
    theme: str
    text: str
    function: Callable[[Theme], Found]
    undisturbed: bool  # the truth is the step without the disturbance
    near: float  # relative error that counts as rounding


HAZARDS: dict[str, Hazard] = {}


class Theme:
    """Hazards of a kind, and what they may use.

    Args:
        disturbed: whether what happens between forward and backward is to happen. For hazards whose truth plain autograd
            cannot give (it raises), the truth is the undisturbed step.
    """

    theme = ""

    def __init__(self, make: Callable[..., nn.Module], disturbed: bool) -> None:
        self.make, self.disturbed = make, disturbed

    def __init_subclass__(cls) -> None:
        for name, function in vars(cls).items():
            if callable(function):
                assert name not in HAZARDS, f"two hazards are called {name}"
                text = (function.__doc__ or "").strip()
                undisturbed = getattr(function, "undisturbed", False)
                HAZARDS[name] = Hazard(name, cls.theme, text, function, undisturbed, getattr(function, "near", NEAR))

    def net(self, blocks: Sequence[nn.Module], **options: Any) -> nn.Module:
        """The contender's network of these blocks. `dim`: the dimension along which two-stream networks split."""
        return self.make(blocks, **options)

    def step(
        self, blocks: Sequence[nn.Module], *inputs: Any, net: dict[str, Any] | None = None, **options: Any
    ) -> Found:
        """A training step of the network of these blocks, with these options."""
        return step(self.net(blocks, **(net or {})), *inputs, **options)


def undisturbed(function: Callable[..., Found]) -> Callable[..., Found]:
    """The truth of this hazard is the step without the disturbance."""
    function.undisturbed = True  # type: ignore[attr-defined]
    return function


def near(error: float) -> Callable[[Callable[..., Found]], Callable[..., Found]]:
    """What relative error counts as rounding in this hazard."""

    def mark(function: Callable[..., Found]) -> Callable[..., Found]:
        function.near = error  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class Cell:
    """One contender on one hazard."""

    kind: str  # "right" | "near" | "wrong" | "raises" | "cannot"
    error: float = 0.0  # largest relative error of a tensor
    where: str = ""  # of which tensor
    message: str = ""
    caught: str = ""  # the verify= that raises, where the default is silently wrong
    apart: float = 0.0  # relative error of gradients against plain floats, where it is worth telling

    def __str__(self) -> str:
        if self.kind == "wrong":
            size = "not finite, or missing" if self.error == float("inf") else f"{self.error:.1g}"
            where = "" if self.where.startswith("gradient") else f" in {self.where.rstrip(' 0123456789')}"
            return f"**wrong** ({size}{where})" + (f"; caught by verify={self.caught!r}" if self.caught else "")
        if self.kind == "raises":
            return f"raises: {self.message}"
        if self.kind == "right" and self.apart:
            return f"right; {self.apart:.0e} from floats"
        return {"right": "right", "near": f"right to {self.error:.0e}", "cannot": "cannot express"}[self.kind]


def judge(h: Hazard, contender: Contender) -> Cell:
    """How a contender does on a hazard."""
    found = attempt(h, lambda blocks, **options: contender.net(blocks, False, **options), True)
    if isinstance(found, CannotExpress):
        return Cell("cannot")
    if isinstance(found, Exception):
        return Cell("raises", message=_first_words(found))
    truth = truth_of(h, contender)
    if isinstance(truth, Exception):
        return Cell("wrong", float("inf"), f"what plain autograd refuses ({_first_words(truth)})")
    error, where = difference(truth, found, h.near)
    if error > h.near:
        return Cell("wrong", error, where)
    plain = attempt(h, lambda blocks, **options: _given(contender.plain(blocks, **options)), not h.undisturbed)
    apart = 0.0
    if not isinstance(plain, Exception):
        apart, where = difference(_gradients(plain), _gradients(found))
        if apart > max(h.near, FIXED_POINT):
            return Cell("wrong", apart, where, apart=apart)
        apart = apart if apart > h.near else 0.0
    return Cell("near", error, where, apart=apart) if error else Cell("right", apart=apart)


def truth_of(h: Hazard, contender: Contender) -> Found | Exception:
    """What the hazard finds with stored tensors."""
    key = h.name, contender.truth
    if not contender.truth or key not in TRUTHS:
        TRUTHS[key] = attempt(h, lambda blocks, **options: contender.net(blocks, True, **options), not h.undisturbed)
    return TRUTHS[key]


TRUTHS: dict[tuple[str, str], Found | Exception] = {}


def judge_ours(h: Hazard, ours: Callable[[str], Contender]) -> Cell:
    """How we do by default; where that is silently wrong, also which verify= sees it."""
    cell = judge(h, ours("auto"))
    if cell.kind == "wrong" and judge(h, ours("strict")).kind == "raises":
        return replace(cell, caught="strict")
    return cell


def attempt(h: Hazard, make: Callable[..., nn.Module], disturbed: bool) -> Found | Exception:
    """What the hazard finds with networks made so, or the error it ends in."""
    with settings_restored(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 (the legacy generator is what users call)
        random.seed(0)
        try:
            return h.function(Theme(make, disturbed))
        except Exception as error:
            return error


@contextmanager
def settings_restored() -> Iterator[None]:
    """Put back what a hazard may change for good if it stops half-way."""
    dtype, grad, anomaly = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_anomaly_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.autograd.set_detect_anomaly(anomaly)


def difference(truth: Found, found: Found, near: float = 0.0) -> tuple[float, str]:
    """The largest relative error and where it is, that of a gradient first; 0 for equal bits."""
    if truth.keys() != found.keys():
        return float("inf"), ", ".join(sorted(truth.keys() ^ found.keys())[:3])
    norms = [
        float(t.double().norm()) for name, t in truth.items() if name.startswith("gradient") and not t.is_complex()
    ]
    floor = 1e-4 * max(
        (n for n in norms if n < float("inf")), default=0.0
    )  # a gradient of 0 has nothing to be relative to
    errors = {name: _relative(truth[name], found[name], floor) for name in truth}
    worst = max(
        errors, key=lambda name: (errors[name] > near and name.startswith("gradient"), errors[name]), default=""
    )
    return errors.get(worst, 0.0), worst


def _gradients(found: Found) -> Found:
    return {name: t for name, t in found.items() if name.startswith("gradient")}


def _relative(a: Tensor, b: Tensor, floor: float) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    error = float((a - b).norm() / max(float(a.norm()), floor, 1e-30))
    return error if error == error else float("inf")


def _given(net: nn.Module | None) -> nn.Module:
    if net is None:
        raise CannotExpress
    return net


def _first_words(error: Exception, most: int = 52) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: text.rfind(" ", 0, most)] + " …"


# What the hazards themselves share.


def square(y: Tensor) -> Tensor:
    return y.float().square().mean() if y.dtype in (torch.bfloat16, torch.float16) else y.square().mean()


def step(
    net: nn.Module, x: Tensor | None = None, *args: Any, loss: Callable[[Tensor], Tensor] = square,
    between: Callable[[], Any] | None = None, **kwargs: Any,
) -> Found:  # fmt: skip
    """Forward (of a batch, if no x is given), what happens in between, backward; and what it gives."""
    x = batch() if x is None else x
    y = net(x, *args, **kwargs)
    if between is not None:
        between()
    loss(y).backward()
    return collect(net, output=y.detach(), **{f"gradient of input {k}": g for k, g in enumerate(_grads((x, *args)))})


def collect(net: nn.Module, **more: Tensor) -> Found:
    """Gradients, buffers and the next random number, beside `more`."""
    found = dict(more)
    for k, p in enumerate(net.parameters()):
        found[f"gradient {k}"] = given(p)
    found |= {f"{name.rpartition('.')[2]} {k}": b.clone() for k, (name, b) in enumerate(net.named_buffers())}
    return found | {"the next random number": torch.rand(1)}


def given(leaf: Tensor) -> Tensor:
    """The gradient that a leaf was given; zeros if none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()


def listed(gradients: Iterable[Tensor]) -> Found:
    return {f"gradient {k}": g.detach() for k, g in enumerate(gradients)}


def _grads(inputs: tuple[Any, ...]) -> list[Tensor]:
    return [given(t) for t in inputs if isinstance(t, Tensor) and t.is_leaf and t.requires_grad]
