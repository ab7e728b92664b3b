"""The examples that torchrun starts say so when they are started without it."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_started_without_torchrun(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=f"torchrun --nproc_per_node 2 examples/{name}.py"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
