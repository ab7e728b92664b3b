"""Table 1 from built networks, checks that can fail, and the page of the family."""

import doctest
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograde as rg
import retrograde.nets as nets
from retrograde_experiments import table1_checks as module
from retrograde_experiments.table1_checks import (
    CASES,
    DECLARED,
    INVERSES,
    PAPER,
    Case,
    Properties,
    check,
    properties,
    render,
    table1,
)

PAGE = Path(__file__).parents[2] / "docs" / "family.md"


@pytest.mark.parametrize("seed", [0, 1])
def test_every_check_bears_out_the_paper_and_what_is_declared(seed: int) -> None:
    rows = table1(seed=seed)
    assert [row.network for row in rows] == list(CASES)
    assert all(row.agrees for row in rows), render(rows)
    assert {row.network for row in rows if row.paper} == set(PAPER)
    for row in rows:
        if row.declared.inverse == "exact":
            assert (row.error, row.evaluations) == (0, 1)
    by_name = {row.network: row for row in rows}
    assert by_name["i-ResNet"].evaluations > 5
    assert 0 < by_name["Neural ODE"].error < 1e-6


def test_the_table_is_aligned_and_shows_the_papers_marks() -> None:
    text = render(table1(("RevNet", "i-ResNet", "ResNet")))
    head, *lines = text.splitlines()
    column = head.index("same parameters")
    assert [line[column:].split("  ")[0] for line in lines] == ["no (no)", "yes (yes)", "yes"]
    assert "exact" in lines[0]


def test_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    table1(("RevNet",))
    assert torch.equal(torch.rand(1), expected)


class Forgetful(nn.Module):
    """Claims an inverse that it does not have."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_false_claim_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def back(net: Forgetful, x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        for block in reversed(net.blocks):
            y = y - block(y)
        return y

    monkeypatch.setitem(DECLARED, Forgetful, Properties("exact", True, True))
    fake = Case(Forgetful, Forgetful, lambda net: net.blocks, back)
    monkeypatch.setitem(CASES, "fake", fake)
    monkeypatch.setattr(module, "NeuralODE", Forgetful)  # it holds x as floats, as those do
    row = check("fake")
    assert row.error > 1e-3
    assert row.found == (False, True, False)
    assert not row.agrees


def test_declared_properties() -> None:
    assert all(p.inverse in INVERSES for p in DECLARED.values())
    blocks = [nn.Linear(2, 2)]
    assert properties(rg.MomentumNet(blocks)).inverse == "exact"
    assert properties(rg.MomentumNet(blocks, gamma=0)).inverse == "none"
    assert properties(rg.MomentumNet(blocks * 2, gamma=[0.5, 0])).inverse == "none"
    assert properties(nets.HamiltonianNet).same_parameters
    assert not properties(nets.RevNet(blocks, blocks)).same_parameters
    with pytest.raises(TypeError, match="Linear is not of the family"):
        properties(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no network is called 'VGG'"):
        table1(("VGG",))


def test_the_page_is_right() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted > 30
    assert result.failed == 0
