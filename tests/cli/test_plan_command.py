"""`retrograde plan`: what is wrong with its arguments is said in a line."""

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
    assert "shape (1, 3, 100, 100)" in line
    assert line.endswith("Give another --size.")
