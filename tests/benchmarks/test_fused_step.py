"""The step fused into a compiled block: the bits of the step by itself, and whether the block's output reaches memory."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config, exc
from torch._inductor.cpp_builder import get_cpp_compiler

from retrograde.core import ops

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fused_step.py"
SMALL = ["--images", "2", "16", "4", "--repeats", "1", "--cases", "resnet", "--dtypes", "bfloat16", "--modes", "train"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # the compiler looks at it
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of its own imports
]


@pytest.fixture
def fused() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def compiler() -> bool:
    try:
        return bool(get_cpp_compiler())
    except (exc.InvalidCxxCompiler, FileNotFoundError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(not compiler(), reason="no C++ compiler for Inductor")
def test_fused_steps_have_the_bits_of_the_operator(fused: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert fused["main"](SMALL) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()[2:]
    assert title.endswith("bfloat16: the step alone differs in 0")
    rows = {line[:19].strip(): line[19:].split() for line in lines}
    assert len(rows) == 5
    _, moved, arrays, _ = rows["compiled alone"][:4]
    for name in ("fused, new state", "fused, in place"):
        assert rows[name][2:4] == [arrays, "0"]  # y is not in memory
        assert float(rows[name][1]) == pytest.approx(float(moved) + 18, abs=1)  # x, v, i; out instead of y


@pytest.mark.slow
@pytest.mark.skipif(not compiler(), reason="no C++ compiler for Inductor")
def test_by_default_an_array_more_goes_through_memory(fused: dict[str, Any]) -> None:
    fused["OPTIONS"].clear()
    torch.manual_seed(0)
    case = next(fused["cases"](fused["parsed"](SMALL)))
    with config.patch(fx_graph_cache=False):
        rows = {row.name: row for row in fused["measured"](case, False, fused["by_floats"], 1)}
    assert rows["fused, new state"].arrays > rows["compiled alone"].arrays == 1
    assert rows["fused, new state"].differ == 0


@pytest.mark.parametrize("multiply", ["by_integers", "by_floats"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_in_torch_operations_is_the_operator(fused: dict[str, Any], multiply: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, v = (torch.randint(-(2**28), 2**28, (20, 50), dtype=torch.int32) for _ in range(2))
    i, y = torch.randint(0, 180, (20, 50)).to(torch.uint8), 100 * torch.randn(20, 50).to(dtype)
    v[0, :4] = torch.tensor([-(2**30), 2**30 - 1, -1, 0])
    found = fused["stepped"](x, v, i, y, fused[multiply])
    exact = [x.clone(), v.clone(), i.clone()]
    _, peaks = fused["advanced"](*exact, y, ops)
    assert all(torch.equal(a, b) for a, b in zip(found, [*exact, peaks], strict=True))


def test_rounding_by_bits_is_the_conversion(fused: dict[str, Any]) -> None:
    ends = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1 + 2**-8, 1 + 3 * 2**-8, 3e38, 3.4e38, 1e-40])
    t = torch.cat([ends, torch.randn(1000) * 10 ** torch.randn(1000)])
    assert torch.equal(fused["through"](t, torch.bfloat16), t.bfloat16().float())
    assert fused["through"](torch.tensor([float("nan")]), torch.bfloat16).isnan().all()
