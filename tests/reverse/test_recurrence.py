"""A recurrence is its fields: what follows from them is worked out anew, whatever a pickle holds."""

import copy
import pickle
from fractions import Fraction

import pytest

from retrograde.reverse.recurrence import Recurrence


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))], ids=["copy", "pickle"])
def test_copies_hold_the_fields_alone(copied) -> None:
    made = Recurrence((Fraction(9, 10),) * 3, "relu", narrow=True)
    made.__dict__["carried"] = "of another version"
    found = copied(made)
    assert found == made
    assert found.carried == Recurrence((Fraction(9, 10),) * 3, "relu", narrow=True).carried
