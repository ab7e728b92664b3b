"""A recurrence is its fields: what follows from them is worked out anew, whatever a pickle holds."""

import copy
import pickle
from fractions import Fraction

import pytest

from retrograde.stack.momentum import Recurrence


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))], ids=["copy", "pickle"])
def test_copies_hold_the_fields_alone(copied) -> None:
    made = Recurrence((Fraction(9, 10),) * 3, "relu", narrow=True)
    made.__dict__["carried"] = "of another version"
    found = copied(made)
    assert found == made
    assert found.carried == Recurrence((Fraction(9, 10),) * 3, "relu", narrow=True).carried


def test_what_an_older_pickle_held_is_left() -> None:
    made = Recurrence.__new__(Recurrence)
    made.__setstate__(
        {"gammas": (Fraction(1, 2),), "form": "block", "narrow": False, "carried": [(1.0, 2.0)], "factors": None}
    )
    assert made == Recurrence((Fraction(1, 2),), "block")
    assert made.carried == Recurrence((Fraction(1, 2),), "block").carried
