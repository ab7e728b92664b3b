"""`gamma="auto"`: the largest power of two at which outputs stay near the plain model's, found without a trace in the model."""

from __future__ import annotations

import copy
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from architectures import tv
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import retrograde as rg
from conversion import anatomy
from retrograde.convert.convert import stages_of
from retrograde.convert.distance import CHOICES, TOLERANCE


class Block(nn.Module):
    """x + scale·f(x), with everything a trial could leave a trace in: statistics, dropout, Python's random numbers, a counter."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.f, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.scale = scale
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        random.random()
        return x + self.scale * nn.functional.dropout(torch.tanh(self.norm(self.f(x))), 0.1, self.training)


def model_of(scale: float, blocks: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(scale) for _ in range(blocks)])


X = torch.linspace(-2, 2, 128).view(16, 8)


def distance(model: nn.Module, gamma: Any) -> float:
    """As documented, by hand: both from the same random numbers."""
    plain, found = [], []
    for into, g in ((plain, 0), (found, gamma)):
        torch.manual_seed(5)
        rg.convert(model, stages=[""], gamma=g, memory="store")
        with torch.no_grad():
            into.append(model(X))
        rg.revert(model)
    return float((found[0] - plain[0]).norm() / plain[0].norm())


@pytest.mark.parametrize("training", [True, False])
def test_the_largest_that_is_near_enough(training: bool) -> None:
    chosen = {}
    for scale in (0.1, 0.5, 4.0):
        model = model_of(scale).train(training)
        torch.manual_seed(5)
        rg.convert(model, X, stages=[""], gamma="auto", memory="store")
        gamma = chosen[scale] = stages_of(model)[0].gamma
        rg.revert(model)
        assert gamma in CHOICES
        assert distance(model, gamma) <= TOLERANCE
        assert gamma == Fraction(1, 2) or distance(model, 2 * gamma) > TOLERANCE
    assert len(set(chosen.values())) > 1, "the scales do not tell apart"


def test_no_trace_but_the_conversion() -> None:
    model, heard = model_of(0.5), list[int]()
    model[0].register_forward_hook(lambda *_: heard.append(1))
    before, state = anatomy(model), {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    random.seed(3)
    x = X.clone()
    rg.convert(
        model, {"input": x}, stages=[""], gamma=1 / 4
    )  # the trial run that checks the stages is there in any case
    calls, hooks = model[0].calls, len(heard)
    rg.revert(model)
    drawn = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    rg.convert(model, {"input": x}, stages=[""], gamma="auto")
    rg.revert(model)
    assert (model[0].calls, len(heard)) == (2 * calls, 2 * hooks)
    assert torch.equal(torch.rand(1), drawn[0])
    assert random.random() == drawn[1]
    assert torch.equal(x, X)
    assert anatomy(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_bits_are_those_of_the_chosen_gamma() -> None:
    """The ranges that a trial has seen are not those of the model."""
    model, given = model_of(0.5), model_of(0.5)
    rg.convert(model, X, stages=[""], gamma="auto", memory="reverse")
    rg.convert(given, stages=[""], gamma=stages_of(model)[0].gamma, memory="reverse")
    for net in (model, given):
        torch.manual_seed(1)
        net(X).square().sum().backward()
    pairs = zip(model.parameters(), given.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


class Far(nn.Module):
    """Whatever γ, the momentum network ends elsewhere: each block throws the others' f away."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e9 * torch.sin(1e9 * x)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (lambda: model_of(0.5), {"example": None}, r"tries the model on an example: rg\.convert\(model, example"),
        (lambda: model_of(0.5), {"gamma": "best"}, "'auto'; got 'best'"),
        (lambda: model_of(0.5).to("meta"), {}, "needs values"),
        (lambda: nn.Sequential(*[Far() for _ in range(4)]), {}, r"within 0\.2 .* 1/2: .*1/256: .*memory='checkpoint'"),
    ],
)
def test_refused(make: Any, options: dict[str, Any], says: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=says):
        rg.convert(model, **{"example": X, "stages": [""], "gamma": "auto"} | options)
    assert not stages_of(model)


def test_a_plan_shows_how_far_outputs_move() -> None:
    model = model_of(0.5).eval()
    plan = rg.plan(model, X, stages=[""], gamma="auto")
    assert [row.distance for row in plan.gammas] == pytest.approx([distance(model, row.gamma) for row in plan.gammas])
    assert plan.gamma == max(g for g in CHOICES if distance(model, g) <= TOLERANCE)
    shown = str(plan)
    assert all(f"{100 * row.distance:.2g} %" in shown for row in plan.gammas if row.distance is not None)
    assert "outputs move" not in str(rg.plan(model, X, stages=[""]))
    with pytest.raises(ValueError, match="needs values"):
        rg.plan(model.to("meta"), X.to("meta"), stages=[""], gamma="auto")


@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_statistics_of_batchnorm_anew(memory: str) -> None:
    """PyTorch's `update_bn` on a converted ResNet: in eval mode it then does what it does in training."""
    torch.manual_seed(0)
    model = tv.resnet.ResNet(tv.resnet.Bottleneck, [3, 4, 2, 1], width_per_group=4, num_classes=10)
    images = torch.randn(16, 3, 48, 48)
    update_bn([images], model)
    rg.convert(model, gamma=1 / 2, memory=memory)

    def moved() -> float:
        with torch.no_grad():
            evaluated, trained = (copy.deepcopy(model).train(mode)(images) for mode in (False, True))
        return float((evaluated - trained).norm() / trained.norm())

    before = moved()
    update_bn([images], model.eval())
    assert not model.training
    assert moved() < 0.05 < 0.2 < before
