"""Our column of the hazard matrix: nothing is silently wrong, and whatever raises says what to do."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hazard_contenders import Checkpoint, Converted, Retrograde, Way
from hazard_list import ALL, THEMES
from hazard_registry import HAZARDS, Cell, Contender, Hazard, Theme, attempt, judge
from torch import Tensor, nn

import retrograde as rg

SEEN_BY_VERIFY_ONLY = {
    "generator_held", "numpy_random", "python_random", "attribute_counts_calls",
    "mutable_configuration_changed_between", "data_swapped_between", "data_written_between", "loss_with_numpy_negatives",
    "batchnorm_outside", "noise_behind_a_small_scale", "noise_beside_large_values",
}  # fmt: skip
REFUSED = {
    "growing_cache", "nan_from_a_block",
    "inf_from_a_block", "parameter_written_between", "optimizer_step_between", "weights_loaded_between", "frozen_between",
    "unfrozen_between", "buffer_written_between", "optimizer_in_backward_nothing_saved", "extra_input_written_between",
    "in_place_on_saved_tensor", "complex_numbers", "block_changes_shape", "backward_twice", "own_function_reading_twice",
    "vmap_over_the_network", "per_sample_gradients", "func_grad", "forward_mode", "loss_against_the_block_before",
    "losses_emptied_before_backward", "differentiable_table_kept", "energy_by_torch_func", "dtype_changed_between",
    "float64_very_small",
}  # fmt: skip
COULD_BE_RIGHT = {
    "optimizer_in_backward_nothing_saved",
    "frozen_between",
    "unfrozen_between",
    "own_function_reading_twice",
}
SAYS = {
    "parameter_written_between": "block 2 was changed after its forward",
    "optimizer_step_between": "was changed after its forward",
    "weights_loaded_between": "was changed after its forward",
    "buffer_written_between": "of block 2 was changed after its forward",
    "extra_input_written_between": "extra input",
    "in_place_on_saved_tensor": "block 3 changed a tensor in place",
    "backward_twice": r"retain_graph=True|second time",
    "dtype_changed_between": r"were made torch.float64 after its forward pass.*float32",
    "energy_by_torch_func": r"block 0 calls torch.func.grad.*memory='store'",
    "losses_emptied_before_backward": "leaves something beside its output",
    "float64_very_small": "Multiply the input",
    "nan_from_a_block": "NaN or Inf out of block 2",
    "inf_from_a_block": "NaN or Inf out of block 2",
    "own_function_reading_twice": "saved_tensors",
    "vmap_over_the_network": "torch.autograd",
    "per_sample_gradients": "torch.autograd",
    "func_grad": "torch.autograd",
    "forward_mode": "torch.autograd",
}
"""What an error must say, beside what is to be done."""
ACTION = re.compile(
    r"\b(use|pass|run|make|change|give|set|specify|leave|find|call|keep|wrap|split|names|zero|multiply)\b",
    re.IGNORECASE,
)


CONTENDERS: dict[str, Contender] = {
    "reverse": Retrograde(),
    "reverse, strict": Retrograde("strict"),
    "checkpoint": Retrograde(memory="checkpoint"),
    "mixed": Way("branch", "mixed"),
    "block": Way("block"),
    "relu": Way("relu"),
    "random sign": Way("branch", sign=True),
    "random sign, relu": Way("relu", sign=True),
    "coupling": Way("coupling"),
    "coupling, checkpoint": Way("coupling", "checkpoint"),
    "plain": Way("residual", "checkpoint"),
    "converted": Converted(),
    "converted, checkpoint": Converted("checkpoint"),
}
NO_GRADIENT_DEPENDS_ON_IT = {"attribute_counts_calls", "mutable_configuration_changed_between", "python_random"}
"""So where inputs are kept, no gradient is wrong."""
SPLIT = dict.fromkeys(("attention_dropout", "blocks_return_other_strides", "padding_mask"), "raises")
"""A coupling splits along the second dimension, which is odd."""
KEPT = dict.fromkeys(NO_GRADIENT_DEPENDS_ON_IT, "right")
FINITE = dict.fromkeys(("nan_from_a_block", "inf_from_a_block", "float64_very_small"), "right")
WRITTEN = dict.fromkeys(("input_written_between", "output_written_after", "in_place_first_operation"), "raises")
HOOKED = dict.fromkeys(("full_backward_hook", "forward_hooks"), "raises")
OTHERWISE: dict[str, dict[str, str]] = {
    "checkpoint": KEPT,
    "coupling": SPLIT,
    "coupling, checkpoint": SPLIT | KEPT,
    "plain": KEPT | FINITE | WRITTEN,  # in floats, and on x itself
    "converted": HOOKED,  # another value than the model adds
    "converted, checkpoint": HOOKED | KEPT,
}
"""What becomes of a hazard where that is something else than with `memory="reverse"`."""


LONG = {"depth_200", "depth_1000", "scale_drifts", "gamma_near_one", "threads_changed_between"}
"""Judged in reverse mode alone."""


def unexpected(contender: str, h: Hazard) -> Cell | None:
    """How a contender does on a hazard, unless that is right to the bit, or refused where it is to be."""
    cell = judge(h, CONTENDERS[contender])
    expected = OTHERWISE.get(contender, {}).get(
        h.name, "raises" if h.name in REFUSED | SEEN_BY_VERIFY_ONLY else "right"
    )
    allowed = {expected} | ({"right"} if h.name in COULD_BE_RIGHT else set())
    if isinstance(CONTENDERS[contender], Way):
        allowed |= {"cannot"}
    return None if cell.kind in allowed else cell


@pytest.mark.parametrize("h", ALL, ids=lambda h: h.name)
def test_never_silently_wrong(h: Hazard) -> None:
    assert unexpected("reverse", h) is None


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("contender", [c for c in CONTENDERS if c != "reverse"])
@pytest.mark.filterwarnings("ignore")
def test_nor_in_other_schemes_and_ways_to_remember(contender: str, theme: str) -> None:
    """Two threads share a generator, so that random signs in them are not those of another run."""
    left = LONG | ({"two_threads"} if "sign" in contender else set())
    found = {h.name: unexpected(contender, h) for h in ALL if h.theme == theme and h.name not in left}
    assert not any(found.values()), {name: cell for name, cell in found.items() if cell}


@pytest.mark.parametrize("name", sorted(SEEN_BY_VERIFY_ONLY))
def test_what_verify_is_for(name: str) -> None:
    """Off, these are silently wrong: if one no longer is, it belongs in another list."""
    assert judge(HAZARDS[name], Retrograde("off")).kind == "wrong"


@pytest.mark.parametrize("name", sorted(SEEN_BY_VERIFY_ONLY))
def test_what_verify_is_for_in_checkpoint_mode(name: str) -> None:
    """Wrong, too, unless what changes enters none of the tensors that the gradient is made of."""
    harmless = name in NO_GRADIENT_DEPENDS_ON_IT
    off = judge(HAZARDS[name], Retrograde("off", memory="checkpoint"))
    assert off.kind == ("right" if harmless else "wrong")


@pytest.mark.parametrize("name", sorted(REFUSED | SEEN_BY_VERIFY_ONLY))
def test_what_raises_says_what_to_do(name: str) -> None:
    ours = Retrograde()
    error = attempt(HAZARDS[name], lambda blocks, **options: ours.net(blocks, False, **options), True)
    if name in COULD_BE_RIGHT and not isinstance(error, Exception):
        pytest.skip("right by now")
    assert isinstance(error, Exception)
    text = str(error)
    assert len(text) > 60
    assert ACTION.search(text.partition(". ")[2] or text), text
    assert re.search(SAYS.get(name, ""), text), text


def test_there_are_enough_hazards_and_each_has_a_line() -> None:
    assert len(ALL) >= 60
    assert {h.theme for h in ALL} == set(THEMES)
    assert all(h.text and "\n" not in h.text and not h.text.endswith(".") for h in ALL)


def test_the_script_that_writes_the_page_finds_what_it_needs() -> None:
    script = Path(__file__).with_name("write_page.py")
    assert subprocess.run([sys.executable, str(script), "--help"], capture_output=True, check=False).returncode == 0


class Halved(Contender):
    """A contender whose gradients are half of what they should be, to see that the judge sees."""

    def net(self, blocks: list[nn.Module], stored: bool, **options: object) -> nn.Module:
        net = Checkpoint().net(blocks, True)
        if not stored:
            for p in net.parameters():
                p.register_hook(lambda g: g * 0.5)
        return net


def test_the_judge_sees_wrong_gradients_errors_and_rounding() -> None:
    h = HAZARDS["input_without_gradient"]
    assert judge(h, Halved()) == Cell("wrong", 0.5, "gradient 0") or judge(h, Halved()).error == pytest.approx(0.5)

    def fails(h: Theme) -> dict[str, Tensor]:
        raise rg.ReplayError("no")

    assert judge(Hazard("", "", "", fails, False, 0), Checkpoint()).kind == "raises"
    noise = iter([0.0, 1e-6, 0.0, 1e-2])
    h = Hazard("", "", "", lambda s: {"gradient": torch.ones(2) + next(noise)}, False, 1e-3)
    assert judge(h, Checkpoint()).kind == "near"
    assert judge(h, Checkpoint()).kind == "wrong"
