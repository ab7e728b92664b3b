"""Every architecture of `architectures.py`: found, converted, trained without stored activations, and put back."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from architectures import ARCHITECTURES

import retrograde as rg
from conversion import anatomy, step
from problems import assert_same_bits
from retrograde.convert.find import find
from retrograde.convert.probe import every, record

# the warnings of the libraries themselves
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
]
SPEECH = {name for name, a in ARCHITECTURES.items() if isinstance(a.example, dict) and "input_values" in a.example}
"""Their feature encoders want a leaf as input."""
TRIED = [name for k, (name, a) in enumerate(ARCHITECTURES.items()) if k % 3 == 1 and not a.trial and name not in SPEECH]
ALSO_CHECKPOINTED = {name for k, name in enumerate(ARCHITECTURES) if k % 4 == 0}


def test_at_least_130_over_seven_ecosystems() -> None:
    ecosystems = [name.split()[0] for name in ARCHITECTURES]
    assert len(ARCHITECTURES) >= 130
    assert set(ecosystems) == {"torchvision", "timm", "transformers", "torch", "diffusers", "monai", "geometric"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_converted_trained_and_reverted(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, call = architecture.make(), architecture.call
    plain, before = step(model, call), anatomy(model)
    state = copy.deepcopy(model.state_dict())
    found = {}
    for mode in ("store", "reverse", *(["checkpoint"] if name in ALSO_CHECKPOINTED else [])):
        architecture.convert(model, gamma=0.9, memory=mode, verify="off" if mode == "store" else "strict")
        found[mode] = step(model, call)
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        model.load_state_dict(state)  # a vanilla checkpoint loads
        rg.revert(model)
    for mode in found:
        assert_same_bits(found["store"], found[mode])
    assert not torch.equal(found["store"]["output"], plain["output"])
    architecture.convert(model, gamma=0, memory="checkpoint")
    assert_same_bits(step(model, call), plain)
    rg.revert(model)
    assert anatomy(model) == before
    assert_same_bits(step(model, call), plain)


@pytest.mark.parametrize("name", TRIED)
def test_what_adapters_say_holds_in_a_trial(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.make()
    finding = find(model)
    assert len(finding.blocks) >= architecture.least
    calls = {node.path: node for node in every(record(model, architecture.example))}
    for run in finding.runs:
        assert [calls[path].form for path in run.blocks] == ["block"] * len(run.blocks)
        assert all(calls[b].follows(calls[a]) for a, b in pairwise(run.blocks))
    for left in finding.left:
        assert calls[left.path].shape != calls[left.path].out_shape or "follows" in left.reason or "no" in left.reason
