"""Our column of the hazard matrix: nothing is silently wrong, and whatever raises says what to do."""

import re

import pytest
import torch
from hazard_contenders import Checkpoint, RandomSign, Retrograde
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
    "buffer_replaced", "buffer_updated", "spectral_norm", "quantisation_observer", "growing_cache", "nan_from_a_block",
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
MUST_NAME = {
    "own_function_reading_twice": "saved_tensors", "vmap_over_the_network": "torch.autograd",
    "per_sample_gradients": "torch.autograd", "func_grad": "torch.autograd", "forward_mode": "torch.autograd",
}  # fmt: skip
ACTION = re.compile(
    r"\b(use|pass|run|make|change|give|set|specify|leave|find|call|keep|wrap|split|names|zero|multiply)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("name", [h.name for h in ALL])
def test_never_silently_wrong(name: str) -> None:
    """By default right to the bit, or refused."""
    cell = judge(HAZARDS[name], Retrograde())
    expected = "raises" if name in REFUSED | SEEN_BY_VERIFY_ONLY else "right"
    assert cell.kind == expected or (name in COULD_BE_RIGHT and cell.kind == "right"), cell


SIGNED = [h.name for h in ALL if not h.name.startswith("depth_") and h.name != "two_threads"]
"""Two threads draw from one generator as it comes, so their signs, like their dropout, are not those of another run."""


@pytest.mark.parametrize("name", SIGNED)
def test_never_silently_wrong_with_random_signs(name: str) -> None:
    cell = judge(HAZARDS[name], RandomSign())
    usual = {"raises"} if name in REFUSED | SEEN_BY_VERIFY_ONLY else {"right"}
    assert cell.kind in usual | {"cannot"} | ({"right"} if name in COULD_BE_RIGHT else set()), cell


@pytest.mark.parametrize("name", sorted(SEEN_BY_VERIFY_ONLY))
def test_what_verify_is_for(name: str) -> None:
    """Off, these are silently wrong: if one no longer is, it belongs in another list."""
    assert judge(HAZARDS[name], Retrograde("off")).kind == "wrong"
    assert judge(HAZARDS[name], Retrograde("strict")).kind == "raises"


NO_GRADIENT_DEPENDS_ON_IT = {
    "attribute_counts_calls",
    "mutable_configuration_changed_between",
    "python_random",
}


@pytest.mark.parametrize("name", sorted(SEEN_BY_VERIFY_ONLY))
def test_what_verify_is_for_in_checkpoint_mode(name: str) -> None:
    """Refused; right where what changes enters none of the tensors that the gradient is made of."""
    harmless = name in NO_GRADIENT_DEPENDS_ON_IT
    assert judge(HAZARDS[name], Retrograde(memory="checkpoint")).kind == ("right" if harmless else "raises")
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
    assert MUST_NAME.get(name, "") in text


@pytest.mark.parametrize(
    "name", [h.name for h in ALL if not h.name.startswith("depth_") and h.theme != "precision and range"]
)
def test_checkpoint_mode_too(name: str) -> None:
    """memory="checkpoint" is never silently wrong where "reverse" is not."""
    if name in SEEN_BY_VERIFY_ONLY:
        pytest.skip("in a test of its own")
    assert judge(HAZARDS[name], Retrograde(memory="checkpoint")).kind in ("right", "raises")


def test_there_are_enough_hazards_and_each_has_a_line() -> None:
    assert len(ALL) >= 60
    assert {h.theme for h in ALL} == set(THEMES)
    assert all(h.text and "\n" not in h.text and not h.text.endswith(".") for h in ALL)


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
