"""γ that moves during training, from a plain loop. Under trainers: tests/integrations/test_callbacks.py."""

from __future__ import annotations

import copy
import json
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from conversion import step
from problems import assert_same_bits
from retrograde.convert.convert import stages_of

X = torch.linspace(-2, 2, 80).view(2, 5, 8)


def encoder(layers: int = 4) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def gamma_of(model: nn.Module) -> Any:
    return stages_of(model)[0].gamma


def test_from_the_plain_network_to_the_converted_one() -> None:
    model = encoder()
    plain = step(model, lambda m: m(X))
    rg.convert(model, gamma=0.9, memory="reverse", fixed_point=rg.FixedPoint(20, torch.int32))
    final = step(model, lambda m: m(X))
    schedule = rg.GammaSchedule(model, {0: 0, 3: 1})
    assert_same_bits(step(model, lambda m: m(X)), plain)
    seen = []
    for _ in range(5):
        seen.append(schedule.step())
        found = step(model, lambda m: m(X))
    assert seen == [Fraction(3, 10), Fraction(3, 5), Fraction(9, 10), Fraction(9, 10), Fraction(9, 10)]
    assert gamma_of(model) == Fraction(9, 10)
    assert_same_bits(found, final)


@pytest.mark.parametrize("memory", ["reverse", "checkpoint", "store", 10**9])
def test_trained_down_to_the_plain_network(memory: Any) -> None:
    """What is left at the end of a fall is what `revert` gives back: outputs, gradients and buffers, to the bit."""
    model = nn.Sequential(*[Normed() for _ in range(4)]).train()
    rg.convert(model, stages=[""], gamma=1 / 8, memory=memory)
    schedule, gammas = rg.GammaSchedule(model, {1: 1, 4: 0}), []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        gammas.append(schedule.step())
    assert gammas[0] == Fraction(1, 8)
    assert gammas == sorted(gammas, reverse=True)
    assert gammas[-2] > 0 == gammas[-1]
    optimizer.zero_grad()
    reverted = rg.revert(copy.deepcopy(model))
    for mode in (True, False):
        assert_same_bits(step(model.train(mode), lambda m: m(X)), step(reverted.train(mode), lambda m: m(X)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.f(x)))


@pytest.mark.parametrize("shape", ["linear", "cosine"])
@pytest.mark.parametrize("points", [{0: 0, 4: 1}, {0: 0.5, 4: 1}, {0: 1, 4: 0}, {0: 0, 1: 1, 3: 1, 5: 0.01}])
def test_every_gamma_on_the_way_is_reversible(shape: str, points: dict[int, float]) -> None:
    model = encoder()
    seen: dict[str, list[Any]] = {}
    for mode in ("store", "reverse"):
        rg.convert(model, gamma=0.9, memory=mode)
        schedule = rg.GammaSchedule(model, points, shape=shape)
        gammas = [schedule.gamma]
        found = [step(model, lambda m: m(X))]
        for _ in range(max(points)):
            gammas.append(schedule.step())
            found.append(step(model, lambda m: m(X)))
        for t, share in points.items():
            assert float(gammas[t]) == pytest.approx(0.9 * share, abs=0.005)
            assert (gammas[t] == 0) == (share == 0)
        seen[mode] = found
        rg.revert(model)
    for a, b in zip(*seen.values(), strict=True):
        assert_same_bits(a, b)


def test_several_stages_and_gammas() -> None:
    model = nn.ModuleList([rg.convert(encoder(), gamma=0.5), rg.convert(encoder(2), gamma=[0.9, 0.8])])
    schedule = rg.GammaSchedule(model, {0: 0, 2: 1})
    schedule.step()
    assert [stage.gamma for stage in stages_of(model)] == [Fraction(1, 4), (Fraction(9, 20), Fraction(2, 5))]


def test_near_one() -> None:
    """γ = 1 is another network, the Hamiltonian limit: it is not rounded to on the way."""
    model = rg.convert(encoder(), gamma=0.999)
    schedule = rg.GammaSchedule(model, {0: 0.9999, 1: 1})
    assert [schedule.gamma, schedule.step()] == [Fraction(99, 100), Fraction(999, 1000)]


def test_resumed() -> None:
    model = rg.convert(encoder())
    schedule = rg.GammaSchedule(model, {0: 0, 5: 1, 10: 0}, shape="cosine")
    for _ in range(7):
        schedule.step()
    other = rg.convert(encoder())
    resumed = rg.GammaSchedule(other, {0: 1})
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert gamma_of(other) == gamma_of(model) not in (0, Fraction(1, 8))
    assert [resumed.step() for _ in range(4)] == [schedule.step() for _ in range(4)]
    again = rg.GammaSchedule(model, {0: 1})  # of the gamma it was converted with, not of where the last one ended
    assert again.gamma == Fraction(1, 8)


@pytest.mark.parametrize(
    ("points", "options", "says"),
    [
        ({}, {}, r"by step, as \{0: 0, 500: 1\}"),
        (500, {}, "got 500"),
        ({2.5: 1}, {}, "whole number of at least 0; got 2.5"),
        ({-1: 1}, {}, "at least 0; got -1"),
        ({0: 0, 9: 2.0}, {}, r"in \[0, 1\]; got 2.0 at step 9"),
        ({0: 0}, {"shape": "square"}, "'linear', 'cosine'; got 'square'"),
    ],
)
def test_wrong_options(points: Any, options: dict[str, Any], says: str) -> None:
    model = rg.convert(encoder())
    with pytest.raises(ValueError, match=says):
        rg.GammaSchedule(model, points, **options)
    assert gamma_of(model) == Fraction(1, 8)


def test_a_model_that_is_not_converted() -> None:
    with pytest.raises(ValueError, match="not converted"):
        rg.GammaSchedule(encoder(), {0: 1})
