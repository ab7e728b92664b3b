"""What is remembered of a block is looked up anew as soon as it is no longer so."""

import copy
import pickle

import torch
from torch import nn

from problems import conv
from retrograde.reverse.parts import Memo, parts_of


def test_remembered_until_anything_is_exchanged() -> None:
    block, memo = conv(), Memo()
    first = parts_of(block, "block 0", memo)
    assert parts_of(block, "block 0", memo) is first
    for change in (
        lambda: block.eval(),
        lambda: setattr(block[0], "weight", nn.Parameter(torch.zeros_like(block[0].weight))),
        lambda: setattr(block[1], "running_mean", torch.ones(4)),
        lambda: block.append(nn.ReLU()),
        lambda: block[1].register_buffer("more", torch.ones(1)),
    ):
        before = parts_of(block, "block 0", memo)
        change()
        assert not before.unchanged()
        assert parts_of(block, "block 0", memo) is not before
    assert parts_of(conv(), "block 0", memo) is not first


def test_statistics_are_told_from_buffers() -> None:
    block = conv()
    training, evaluating = parts_of(block, "", None), parts_of(block.eval(), "", None)
    assert [len(p.statistics) for p in (training, evaluating)] == [2, 0]
    assert [len(p.watched) for p in (training, evaluating)] == [6, 6 + 2 * 3]


def test_lazy_parts_are_not_remembered() -> None:
    memo = Memo()
    parts_of(nn.LazyLinear(4), "lazy", memo)
    assert not memo


def test_copies_know_nothing() -> None:
    memo = Memo()
    parts_of(conv(), "block 0", memo)
    assert len(memo) == 1
    assert len(copy.deepcopy(memo)) == len(pickle.loads(pickle.dumps(memo))) == 0
