"""The examples run, and so does the first snippet of the page."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from retrograde.extras import require

ROOT = Path(__file__).parents[2]
SAYS = {
    "convert_own_loop": "in reverse", "convert_language_model": "gamma 1/8", "convert_resnet": "Bottleneck again",
    "cuda_graph": "graph",
}  # fmt: skip


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    assert SAYS[name] in capsys.readouterr().out


@pytest.mark.parametrize("name", ["convert", "random-sign"])
def test_page(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    require("torchvision")  # beside a CPU build of PyTorch it needs help to be imported
    snippet = re.findall(r"```python\n(.*?)```", page, re.S)[0]
    assert "rg.convert(" in snippet
    exec(compile(snippet, f"docs/{name}.md", "exec"), {})
