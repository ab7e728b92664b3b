"""`retrograde plan`: what is wrong with its arguments is said in a line."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrograde.cli.app import app


@pytest.mark.parametrize("model", ["timm/vit_tiny_patch16_224", "torchvision/vit_b_16"])
def test_a_size_that_the_model_was_not_made_for(model: str) -> None:
    """Both refuse it by an assertion."""
    shown = CliRunner().invoke(app, ["plan", model, "--batch", "2", "--size", "100"])
    assert shown.exit_code == 1
    assert isinstance(shown.exception, SystemExit)
    (line,) = (line for line in shown.output.splitlines() if line.strip())
    assert line.startswith("Error: ")
    assert "shape (2, 3, 100, 100)" in line
    assert "Give another --size, or package.module:function" in line


OWN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.f(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.places, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = x + self.places(torch.arange(16))
        for block in self.blocks:
            x = block(x)
        return x

def make():
    return Model(), torch.randn(2, 16, 8)
"""


@pytest.mark.parametrize("stage", [[], ["--stage", "blocks"]])
def test_a_model_of_ones_own(stage: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder that the command is run from; it makes a tensor in its forward pass, as every language model does."""
    (tmp_path / "retrograde_own_model.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    arguments = ["plan", "retrograde_own_model:make", "--gamma", "0.5", "--batch", "2", "--budget", "1MB", *stage]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "4 blocks in 1 momentum stages" in shown.output
    named = ", stages=['blocks']" if stage else ""
    assert f"rg.convert(model, gamma=0.5{named}, memory=" in shown.output
    assert "largest" in shown.output


def test_a_batch_of_two_is_planned_at_two() -> None:
    """Not at one, which a BatchNorm over one pixel refuses."""
    shown = CliRunner().invoke(app, ["plan", "timm/resnet18", "--batch", "2", "--size", "32"])
    assert shown.exit_code == 0, shown.output


def test_near_names_are_named_once() -> None:
    shown = CliRunner().invoke(app, ["plan", "resnet5"])
    assert shown.output.count("resnet50,") == 1


@pytest.mark.parametrize("option", [["--amp", "fp8"], ["--optimizer", "lion"], ["--budget", "24 sheep"]])
def test_wrong_options_are_named(option: list[str]) -> None:
    shown = CliRunner().invoke(app, ["plan", "resnet18", *option])
    assert shown.exit_code == 1
    assert repr(option[1]) in shown.output
