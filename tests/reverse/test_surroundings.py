"""Random numbers are drawn again from where they were drawn first, and the generators are left where they stood."""

import pytest
import torch
from torch import Tensor

from retrograde.errors import ReplayError
from retrograde.reverse.cuda import Undrawn
from retrograde.reverse.extra import Surroundings, shared


def test_places_are_put_back() -> None:
    given = torch.Generator().manual_seed(3)
    generators = Surroundings("cpu", (), [given])
    places = shared(generators.places())
    drawn = torch.rand(3), torch.randn(5), torch.rand(2, generator=given)
    generators.put(places)
    assert torch.equal(torch.rand(3), drawn[0])
    assert torch.equal(torch.randn(5), drawn[1])
    assert torch.equal(torch.rand(2, generator=given), drawn[2])


def test_runs_that_draw_nothing_share_one_state() -> None:
    generators = Surroundings("cpu", (), [])
    first, second = shared(generators.places()), shared(generators.places())
    assert first[1][0] is second[1][0]
    torch.rand(1)
    assert shared(generators.places())[1][0] is not first[1][0]


class OnCuda(Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(("p", "refused"), [(0.5, True), (0.0, False)])
def test_a_captured_block_may_not_draw(p: float, refused: bool) -> None:
    """The mode sees the operator with its arguments; on a CPU it is called by hand."""
    x = torch.ones(4).as_subclass(OnCuda)
    call = torch.ops.aten.native_dropout.default
    with torch._C.DisableTorchFunctionSubclass():
        if refused:
            with pytest.raises(
                ReplayError, match=r"native_dropout.* draws random numbers while a CUDA graph is captured"
            ):
                Undrawn().__torch_dispatch__(call, (), (x, p, True))
        else:
            Undrawn().__torch_dispatch__(call, (), (x, p, True))
        Undrawn().__torch_dispatch__(torch.ops.aten.add.Tensor, (), (x, x))
