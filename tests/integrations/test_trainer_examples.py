"""Each trainer runs unchanged but for one line, with the weights of stored activations in every memory mode."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from problems import assert_same_bits

FOLDER = Path(__file__).parents[2] / "examples" / "trainers"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "tiny")
ONE_LINE = re.compile(
    r"^(?:(?P<convert>rg\.convert\(model)(?P<more>.*)|(?P<callback>reversible = Reversible\(.*))\)  # the one line.*$",
    re.M,
)
CHECKPOINTED = {"hf_trainer", "trl_sft", "trl_qlora", "peft_lora", "timm_training", "diffusers_training"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # those of eight packages
]


def trained(name: str, memory: str | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The weights after an example with another memory mode; without conversion for None."""
    source = (FOLDER / f"{name}.py").read_text()
    (line,) = ONE_LINE.finditer(source)
    if memory is None:
        put = "pass" if line["convert"] else "import lightning; reversible = lightning.pytorch.callbacks.Callback()"
    else:
        put = f"{line['convert'] or line['callback']}{line['more'] or ''}, memory={memory!r})"
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    names = {"__name__": "__main__"}
    exec(compile(source.replace(line[0], put), f"{name}.py", "exec"), names)
    model = names["model"]
    assert isinstance(model, nn.Module)
    assert ("momentum, gamma=1/8" in repr(model)) == (memory is not None)
    return {key: t.clone() for key, t in model.state_dict().items() if isinstance(t, Tensor)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_line(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from retrograde.convert import checkpointing

    checkpointing.say_once.cache_clear()
    exact = trained(name, "store", monkeypatch)
    assert [record.name for record in caplog.records].count("retrograde") == (name in CHECKPOINTED)
    for memory in ("reverse", "checkpoint", "auto"):
        assert_same_bits(trained(name, memory, monkeypatch), exact)
    plain = trained(name, None, monkeypatch)
    assert plain.keys() == exact.keys()
    assert any(not torch.equal(plain[key], exact[key]) for key in plain)


def test_every_trainer_has_one() -> None:
    text = "".join((FOLDER / f"{name}.py").read_text() for name in EXAMPLES)
    for package in ("transformers", "trl", "peft", "accelerate", "lightning", "timm", "diffusers"):
        assert re.search(rf'"{package}["\.]', text), package
