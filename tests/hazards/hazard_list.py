"""Every hazard, in the order of the table."""

import hazards_autograd
import hazards_beside
import hazards_faults
import hazards_inputs
import hazards_parameters
import hazards_precision
import hazards_random
import hazards_state
from hazard_registry import HAZARDS

THEMES = [m.THEME for m in (
    hazards_random, hazards_state, hazards_beside,
    hazards_precision, hazards_parameters, hazards_inputs, hazards_autograd, hazards_faults,
)]  # fmt: skip
ALL = sorted(HAZARDS.values(), key=lambda h: THEMES.index(h.theme))
