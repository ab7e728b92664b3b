"""`retrograde plan`: what is wrong with its arguments is said in a line."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrograde.cli import models
from retrograde.cli.app import app
from retrograde.cli.plan import largest
from retrograde.extras import require


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
        self.places, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(24))

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
    arguments = ["plan", "retrograde_own_model:make", "--gamma", "0.5", "--batch", "2", *stage]
    shown = CliRunner().invoke(app, [*arguments, "--budget", "1MB"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[0].startswith("plain fits: nothing to do (")
    assert "24 blocks in 1 momentum stages" in shown.output
    assert "rg.convert" not in shown.output
    shown = CliRunner().invoke(app, [*arguments, "--budget", "45kB"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[0].startswith("converting ")
    named = ", stages=['blocks']" if stage else ""
    assert f"rg.convert(model, gamma=0.5{named}, memory=" in shown.output
    assert "max batch" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80


def test_a_batch_of_two_is_planned_at_two() -> None:
    """Not at one, which a BatchNorm over one pixel refuses."""
    shown = CliRunner().invoke(app, ["plan", "timm/resnet18", "--batch", "2", "--size", "32"])
    assert shown.exit_code == 0, shown.output


def test_near_names_are_named_once() -> None:
    shown = CliRunner().invoke(app, ["plan", "resnet5"])
    assert shown.output.count("resnet50,") == 1


@pytest.mark.parametrize("option", [["--amp", "fp8"], ["--optimizer", "sheep"], ["--budget", "24 sheep"]])
def test_wrong_options_are_named(option: list[str]) -> None:
    shown = CliRunner().invoke(app, ["plan", "resnet18", *option])
    assert shown.exit_code == 1
    assert repr(option[1]) in shown.output


@pytest.fixture(scope="module")
def small_gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with its config."""
    folder = tmp_path_factory.mktemp("gpt2")
    require("transformers").GPT2Config(
        n_embd=32, n_layer=8, n_head=2, n_positions=256, vocab_size=100, bos_token_id=0, eos_token_id=0
    ).save_pretrained(folder)
    return str(folder)


def test_a_folder_with_a_config(small_gpt2: str) -> None:
    arguments = ["plan", small_gpt2, "--batch", "8", "--budget", "60MB", "--optimizer", "adamw"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("checkpointing is as good here: the peak is outside of the stages"), shown.output
    assert all(len(line) <= 80 for line in shown.output.splitlines())
    (header,) = (line for line in shown.output.splitlines() if "max batch" in line)
    assert header.endswith("max length")
    assert "adamw " in shown.output
    most = [int(line.split()[-1]) for line in shown.output.splitlines() if line.startswith(("plain ", "auto "))]
    assert 0 < most[0] < most[1] <= 256


def test_layers_in_two_steps(small_gpt2: str) -> None:
    shown = CliRunner().invoke(app, ["plan", small_gpt2, "--split", "--size", "128"])
    assert shown.exit_code == 0, shown.output
    assert "block, 16 steps" in shown.output
    shown = CliRunner().invoke(app, ["plan", "resnet18", "--split", "--batch", "2"])
    assert shown.exit_code == 1
    assert "split=True, and there is no layer to split" in shown.output


def test_encoder_and_decoder_of_a_model_that_hears(tmp_path: Path) -> None:
    """With its LayerDrop, whose draws have no values in a plan."""
    require("transformers").WhisperConfig(
        d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, vocab_size=100, max_source_positions=50, max_target_positions=20, encoder_layerdrop=0.1,
        decoder_layerdrop=0.1, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ).save_pretrained(tmp_path)  # fmt: skip
    shown = CliRunner().invoke(app, ["plan", str(tmp_path), "--batch", "2"])
    assert shown.exit_code == 0, shown.output
    assert "WhisperForConditionalGeneration: 6 blocks in 2 momentum stages" in shown.output
    assert "takes at most 20 tokens" in CliRunner().invoke(app, ["plan", str(tmp_path), "--size", "21"]).output


def test_adapters_of_a_rank_are_all_that_is_trained(small_gpt2: str) -> None:
    whole, adapters = (
        CliRunner().invoke(app, ["plan", small_gpt2, *more]).output for more in ([], ["--lora-rank", "2"])
    )
    gradients = [re.search(r"gradients ([\d.]+) kB", output) for output in (whole, adapters)]
    assert gradients[1] is not None, adapters
    assert gradients[0] is None or float(gradients[0][1]) > 5 * float(gradients[1][1])


def test_more_tokens_than_there_are_positions(small_gpt2: str) -> None:
    shown = CliRunner().invoke(app, ["plan", small_gpt2, "--size", "5000"])
    assert shown.exit_code == 1
    assert "takes at most 256 tokens; got --size 5000" in shown.output


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    shown = CliRunner().invoke(app, ["plan", "resnet50"])
    assert shown.exit_code == 1
    assert "Not installed, so not looked in: torchvision, timm, transformers (pip install" in shown.output


def test_a_name_that_neither_a_folder_nor_the_hub_has() -> None:
    shown = CliRunner().invoke(app, ["plan", "nobody/nothing"])
    assert shown.exit_code == 1
    assert "no folder with a config.json" in shown.output


def test_largest_is_on_the_polynomial_through_the_points() -> None:
    assert largest({2: 104, 4: 116, 8: 164}, available=500) == 20  # 100 + n²
    assert largest({2: 104, 4: 116, 8: 164}, available=499) == 19
    assert largest({2: 50, 4: 50}, available=500) is None
    assert largest({2: 52, 4: 54}, available=40) == 0
