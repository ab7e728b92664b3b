"""What cannot be converted says so, and is left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import retrograde as rg
from conversion import anatomy
from retrograde.convert.convert import stages_of
from retrograde.extras import require
from retrograde.nets.resnet import thin_resnet


def encoder(layers: int = 3) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), layers)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Half(nn.Module):
    """Residual, but every second one leaves out half of the channels."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.linear, self.halves = nn.Linear(8, 8), halves

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.linear(x)
        return y[..., :4] if self.halves else y


class Adds(nn.Module):
    """Adds what its layers return, multiplied."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor], layers: int = 3) -> None:
        super().__init__()
        self.layers, self.add = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers)), add

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.add(x, layer(x))
        return x


SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "s·f": lambda x, f: x + 0.5 * f,
    "f·s + x": lambda x, f: f * torch.full((8,), 0.5) + x,
    "f / s": lambda x, f: x + f / 2,
    "alpha": lambda x, f: torch.add(x, f, alpha=0.5),
    "alpha in place": lambda x, f: x.clone().add_(f, alpha=0.5),
}


def resnet() -> Any:
    models = require("torchvision.models")
    return models.resnet.ResNet(models.resnet.Bottleneck, [2, 2, 1, 1], width_per_group=4)


X = torch.randn(2, 5, 8)
WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "nothing to convert": (Plain, {}, ValueError, r"no run of two or more residual blocks.*layers: 3 × Linear[^$]*an example"),
    "nothing in a trial": (Plain, {"example": X}, ValueError, r"no run of two or more"),
    "path": (encoder, {"stages": ["layer"]}, ValueError, r"'layer'. Did you mean 'layers'"),
    "nested path": (encoder, {"stages": ["layers.0.self_atn"]}, ValueError, r"Did you mean 'layers.0.self_attn'"),
    "shape by class": (resnet, {"stages": ["layer2"]}, ValueError, r"layer2.0 changes the shape.*Leave it out"),
    "shape by trial": (
        lambda: nn.Sequential(Half(False), Half(True)), {"stages": ["0", "1"], "example": X}, ValueError,
        r"\(2, 5, 8\) to \(2, 5, 4\)",
    ),
    "not a model": (lambda: 3, {}, TypeError, "must be an nn.Module; got int"),
    "empty": (nn.ModuleList, {}, ValueError, "empty"),
    "gamma": (encoder, {"gamma": 1.5}, ValueError, "1.5"),
    "gammas": (encoder, {"gamma": [0.9, 0.8]}, ValueError, "2"),
    "gamma 0 in reverse": (encoder, {"gamma": 0, "memory": "reverse"}, ValueError, "cannot be run in reverse"),
    "memory": (encoder, {"memory": "less"}, ValueError, "'reverse', 'checkpoint', 'store', 'auto', or a budget.* got 'less'"),
    "form": (encoder, {"form": "blocks"}, ValueError, "form must be one of"),
    "verify": (encoder, {"verify": True}, ValueError, "verify must be one of"),
    "overflow": (encoder, {"overflow": "ignore"}, ValueError, "overflow must be one of"),
    "velocity": (encoder, {"velocity": "last"}, ValueError, "velocity must be one of"),
    "fixed point": (encoder, {"fixed_point": 20}, ValueError, r"fixed_point must be .*FixedPoint.* got 20"),
    "a stage twice": (encoder, {"stages": ["layers", "layers.0"]}, ValueError, "layers.0 is in two of the stages"),
    "momentum already": (lambda: thin_resnet(20, gamma=0.9), {}, ValueError, r"layer1.0 is a block of .* layer1 \(RectifiedNet\)"),
    "in a momentum network": (
        lambda: nn.Sequential(rg.MomentumNet(encoder().layers, form="block")), {}, ValueError, r"0 \(MomentumNet\).*plain network",
    ),
    "another form": (encoder, {"stages": ["layers"], "form": "branch", "example": X}, ValueError, "pass form='block'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused_and_untouched(name: str) -> None:
    make, options, error, says = WRONG[name]
    model = make()
    before = anatomy(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=f"(?s){says}"):
        rg.convert(model, **options)
    assert before is None or anatomy(model) == before


@pytest.mark.parametrize("name", SCALED)
def test_branches_that_the_model_scales_are_not_found_and_refused_by_name(name: str) -> None:
    """A step adds f(x) as it is. One layer alone is refused, too."""
    model = Adds(SCALED[name])
    with pytest.raises(ValueError, match="no run of two or more"):
        rg.convert(model, X)
    if name == "alpha in place":  # autograd does not see that x and its clone are one
        return
    for stages in (["layers"], ["layers.1"]):
        for form in (None, "branch"):
            with pytest.raises(ValueError, match=r"x \+ s·f\(x\). Multiply inside of the block"):
                rg.convert(model, X, stages=stages, form=form)
    assert type(model.layers[0]) is nn.Linear
    assert len(stages_of(rg.convert(Adds(torch.add), X))) == 1


def test_already_converted() -> None:
    model = rg.convert(encoder())
    before = anatomy(model)
    with pytest.raises(ValueError, match=r"already converted.*rg\.revert"):
        rg.convert(model)
    with pytest.raises(ValueError, match=r"layers\.0 is already converted"):
        rg.convert(model, stages=["layers"])
    assert anatomy(model) == before


def test_not_converted() -> None:
    with pytest.raises(ValueError, match="this TransformerEncoder is not converted"):
        rg.revert(encoder())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_and_compiled() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), X)
    with pytest.raises(TypeError, match="scripted"):
        rg.convert(scripted)
    with pytest.raises(TypeError, match="compiled"):
        rg.convert(torch.compile(encoder(), backend="eager"))  # type: ignore[arg-type]
    model = encoder()
    model.layers[1].compile(backend="eager")
    before = anatomy(model)
    with pytest.raises(TypeError, match=r"layers\.1 is compiled in place"):
        rg.convert(model)
    assert anatomy(model) == before
    inner = encoder()
    inner.layers[1] = torch.compile(inner.layers[1], backend="eager")
    with pytest.raises(TypeError, match=r"layers\.1 is compiled"):
        rg.convert(inner, stages=["layers"])


def test_forward_replaced_on_the_object() -> None:
    model = encoder()
    model.layers[2].forward = model.layers[2].forward
    with pytest.raises(TypeError, match=r"forward of layers\.2 was replaced"):
        rg.convert(model)


def test_a_block_that_returns_another_shape_says_which() -> None:
    model = nn.Sequential(Half(False), Half(True), nn.Linear(4, 1))
    rg.convert(model, stages=["[01]"])
    with pytest.raises(ValueError, match=r"1 turned a \(2, 5, 8\).*into a \(2, 5, 4\)"):
        model(X)
    rg.revert(model)
    assert model(X).shape == (2, 5, 1)


def test_called_without_its_input_or_with_integers() -> None:
    model: Any = rg.convert(encoder())
    with pytest.raises(TypeError, match=r"layers\.0 was called without its input 'src'"):
        model.layers[0](mask=None)
    with pytest.raises(TypeError, match="floating-point"):
        model.layers[0](torch.ones(2, 5, 8, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_traced(seen: bool, grad: bool) -> None:
    """Refused; then trained as if nothing had been."""
    model = rg.convert(encoder(6), memory="reverse")
    if seen:
        model(X)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"torch\.jit\.trace does not see"):
        torch.jit.trace(model, X)
    model(X).sum().backward()
    assert stages_of(model)[0].range.now.dtype == torch.int32


def test_under_function_transforms_and_forward_mode() -> None:
    model = rg.convert(encoder(6))
    with pytest.raises(RuntimeError, match=r"torch\.func's transforms"):
        torch.func.vmap(model)(X)
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(RuntimeError, match="forward-mode derivatives"):
        model(forward_ad.make_dual(X, torch.ones_like(X)))


def test_sparse_meta_and_nan() -> None:
    model: Any = rg.convert(encoder(6))
    with pytest.raises(TypeError, match=r"input of layers\.0, converted .*sparse_coo one\. Pass x\.to_dense"):
        model.layers[0](X.to_sparse())
    with pytest.raises(rg.RangeOverflow, match=r"layers\.0-5': NaN or Inf in the input"):
        model(X * float("nan"))
    with pytest.raises(TypeError, match="a meta tensor has no values"):
        model.to("meta")(X.to("meta"))


def test_a_reversible_part_of_a_model_is_left_alone() -> None:
    """A teacher that is a momentum network already, and a student that is not."""
    model = nn.ModuleDict({"teacher": thin_resnet(20, gamma=0.9), "student": thin_resnet(20)})
    rg.convert(model)
    assert all(stage.name.startswith("student.") for stage in stages_of(model))
    with pytest.raises(ValueError, match="is a block of a reversible network already"):
        rg.convert(nn.ModuleDict({"teacher": thin_resnet(20, gamma=0.9)}), stages=["teacher.layer1"])


@pytest.mark.parametrize("example", [0.5, 1, "abc"])
def test_gamma_in_the_place_of_the_example(example: Any) -> None:
    """`MomentumNet(blocks, 0.5)` takes γ there; here it was ignored, and 0.9 taken."""
    for call in (rg.convert, rg.plan):
        with pytest.raises(TypeError, match=f"γ is given by its name: gamma={example!r}"):
            call(encoder(), example)
