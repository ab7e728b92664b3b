"""Stages that the user names without an example: blocks that are no steps of a momentum network are refused, in the first call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import layer_norm

import retrograde as rg
from retrograde.convert.convert import stages_of

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
GAMMA = 1 / 8
How = Callable[["Loop", nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """`returns`: what it makes of x and f."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.outer, self.returns = nn.Linear(8, 12), nn.Linear(12, 8), returns

    def forward(self, x: Tensor) -> Any:
        return self.returns(x, self.outer(torch.tanh(self.inner(x))))


class Loop(nn.Module):
    """Blocks, and what the model does with each; `order`: in which it calls them."""

    def __init__(self, how: How, returns: Callable[[Tensor, Tensor], Any], order: Sequence[int] = range(12)) -> None:
        super().__init__()
        self.stem, self.norm, self.dropout = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.full((8,), 0.3))
        self.layers = nn.ModuleList(Block(returns) for _ in set(order))
        self.how, self.order = how, order

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for k in self.order:
            x = self.how(self, self.layers[k], x)
        return x


class Fused(Function):
    """x + f, in an operation of somebody's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Tensor) -> Tensor:
        return x + f

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return g, g


def drop_path(model: Loop, layer: nn.Module, x: Tensor) -> Tensor:
    f = layer(x)
    return x + (f * (torch.rand(len(x), 1) < 0.9) / 0.9 if model.training else f)


def block(x: Tensor, f: Tensor) -> Tensor:
    return x + f


def branch(x: Tensor, f: Tensor) -> Tensor:
    return f


def by_itself(model: Loop, layer: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = layer(x)
    return out


ADDS = "does not return x.*pass form='branch'|was not given what the block before it returned.*Pass form='branch'"
CHANGED = "does not add what the block before layers.1 returned to x as it is, but calls"
NEVER = "was not given what the block before it returned"
NEITHER = "[Pp]ass form=.*no residual block"
TWICE = "layers.0 is run twice in a row"
SCALED = {None: (ADDS, ADDS), "block": (NEVER, NEVER), "branch": (CHANGED, CHANGED)}
DROPPED = {None: (ADDS, ADDS), "branch": (CHANGED, "")}
NORMED = {None: (ADDS, ADDS), "branch": (NEVER, NEVER)}
# what the model does, what its blocks return; by form, with which words training and evaluation are refused, "" if they are not
HOW: dict[str, tuple[How, Callable[[Tensor, Tensor], Any], dict[str | None, tuple[str, str]]]] = {
    "x + f": (
        lambda m, layer, x: x + layer(x), branch, {None: (ADDS, ADDS), "block": (NEVER, NEVER), "branch": ("", "")}
    ),
    "DropPath": (drop_path, branch, DROPPED),
    "dropout": (lambda m, layer, x: x + m.dropout(layer(x)), branch, DROPPED),
    "LayerScale": (lambda m, layer, x: x + m.scale * layer(x), branch, SCALED),
    "x + s·f": (lambda m, layer, x: x + 0.5 * layer(x), branch, SCALED),
    "alpha": (lambda m, layer, x: torch.add(x, layer(x), alpha=0.5), branch, SCALED),
    "in place": (lambda m, layer, x: x + layer(x).mul_(0.5), branch, SCALED),
    "post-norm": (by_itself, lambda x, f: layer_norm(x + f, (8,)), {None: ("", "")}),
    "post-norm by the model": (lambda m, layer, x: m.norm(x + layer(x)), branch, NORMED),
    "pre-norm by the model": (lambda m, layer, x: x + layer(m.norm(x)), branch, NORMED),
    "block": (by_itself, block, {None: ("", ""), "branch": ("Pass form='block'", "Pass form='block'")}),
    "an operation of its own": (by_itself, Fused.apply, {None: ("", ""), "block": ("", "")}),
    "part of x": (by_itself, lambda x, f: torch.cat([x[:, :4] + f[:, :4], f[:, 4:]], 1), {None: ("", "")}),
    "neither": (by_itself, branch, {None: (NEITHER, ""), "block": ("", ""), "branch": (NEITHER, NEITHER)}),
    "a tuple": (lambda m, layer, x: layer(x)[0], lambda x, f: (x + f, f), {None: ("", "")}),
    "a tuple of f": (
        lambda m, layer, x: x + layer(x)[0], lambda x, f: (f, f.mean()), {None: (ADDS, ADDS), "branch": ("", "")}
    ),
    "x last": (lambda m, layer, x: layer(x)[1], lambda x, f: (f, x + f), {None: (ADDS, NEVER), "branch": (NEVER, NEVER)}),
    "twice": (lambda m, layer, x: layer(layer(x)), block, {None: (TWICE, TWICE)}),
}  # fmt: skip
CASES = [
    (name, form, training, words)
    for name, (*_, forms) in HOW.items()
    for form, both in forms.items()
    for training, words in zip((True, False), both, strict=True)
]


def called(model: nn.Module, training: bool) -> Tensor:
    with torch.set_grad_enabled(training), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y: Tensor = model.train(training)(X)
    return y


@pytest.mark.parametrize(("name", "form", "training", "words"), CASES)
def test_what_blocks_do_is_seen_in_the_first_call(name: str, form: str | None, training: bool, words: str) -> None:
    how, returns, _ = HOW[name]
    model = Loop(how, returns)
    plain = copy.deepcopy(model)
    rg.convert(model, stages=["layers"], form=form, gamma=GAMMA)
    if words:
        with pytest.raises(ValueError, match=f"(?s){words}"):
            called(model, training)
        rg.revert(model)
        assert torch.equal(called(model, False), called(plain, False))
        return
    for layer in plain.layers:  # as if it were x + f(x), which the loop is given
        layer.returns = (lambda x, f: f) if form == "branch" else returns
    wanted = written_out(plain, plain.stem(X), adds=form == "branch")
    torch.testing.assert_close(called(model, training), wanted, rtol=1e-4, atol=1e-4)


def written_out(model: Loop, x: Tensor, adds: bool) -> Tensor:
    v = torch.zeros_like(x)
    for k in model.order:
        y = model.layers[k](x)
        y = y[0] if isinstance(y, tuple) else y
        v = GAMMA * v + (1 - GAMMA) * (y if adds else y - x)
        x = x + v
    return x


@pytest.mark.parametrize("training", [True, False])
def test_gamma_zero_takes_any_blocks(training: bool) -> None:
    """It is the plain model."""
    model = Loop(by_itself, branch)
    wanted = called(model, training)
    assert torch.equal(called(rg.convert(model, stages=["layers"], gamma=0, memory="checkpoint"), training), wanted)


def test_an_example_that_shows_nothing_leaves_it_to_the_first_call() -> None:
    with pytest.raises(ValueError, match="no residual block"):
        called(rg.convert(Loop(by_itself, branch), X, stages=["layers"]), True)


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 0, 2, 3], [0, 2, 1, 3]], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_blocks_that_run_in_another_order_than_they_have_are_taken_in_that_order(
    order: list[int], training: bool
) -> None:
    model = Loop(by_itself, block, order)
    plain = copy.deepcopy(model)
    rg.convert(model, stages=["layers"], gamma=GAMMA)
    for _ in range(2):
        torch.testing.assert_close(
            called(model, training), written_out(plain, plain.stem(X), False), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("times", [1, 2])
def test_a_block_that_is_called_twice_in_a_row_by_example(times: int) -> None:
    """As the words of the refusal advise."""
    order = [0] * times + [1] * times
    model = rg.convert(Loop(by_itself, block, order), X, gamma=GAMMA)
    assert [stage.steps for stage in stages_of(model)] == [2 * times]
    torch.testing.assert_close(
        called(model, True), written_out(rg.revert(copy.deepcopy(model)), model.stem(X), False), rtol=1e-4, atol=1e-4
    )  # type: ignore[arg-type]


def test_dropout_that_begins_after_the_first_calls() -> None:
    """DropPath rates begin at 0, so that the first blocks follow one another."""
    model = rg.convert(Loop(drop_path, branch).eval(), stages=["layers"], form="branch", gamma=GAMMA)
    called(model, False)
    with pytest.raises(ValueError, match=CHANGED):
        called(model, True)


@pytest.mark.parametrize("said", [True, False])
def test_deployed_before_its_first_call(said: bool) -> None:
    model = rg.convert(
        Loop(lambda m, layer, x: x + layer(x), branch), stages=["layers"], form="branch" if said else None, gamma=GAMMA
    )
    plain = rg.revert(copy.deepcopy(model))
    rg.deploy(model)
    if said:
        wanted = written_out(plain, plain.stem(X), True)  # type: ignore[arg-type, operator]
        torch.testing.assert_close(called(model, False), wanted, rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(ValueError, match=ADDS):
            called(model, False)


def test_function_transforms_are_refused_by_name() -> None:
    model = rg.convert(Loop(lambda m, layer, x: layer(x), block), stages=["layers"])
    with pytest.raises(RuntimeError, match=r"torch\.func's transforms"):
        torch.func.vmap(lambda x: model(x[None])[0])(X)


def test_a_call_of_one_block_alone_is_no_sign_of_anything() -> None:
    model: Any = rg.convert(Loop(by_itself, block), stages=["layers"], gamma=GAMMA)
    with torch.no_grad(), pytest.warns(UserWarning, match="given something other than the output of the block before"):
        model.layers[11](X)
    called(model, False)
