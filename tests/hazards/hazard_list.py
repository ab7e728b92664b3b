"""Every hazard, in the order of the table."""

from hazard_registry import HAZARDS
from hazards_autograd import Autograd
from hazards_beside import BesideTheOutput
from hazards_faults import Faults
from hazards_inputs import Inputs
from hazards_parameters import Parameters
from hazards_precision import Precision
from hazards_random import RandomNumbers
from hazards_state import State

THEMES = [t.theme for t in (RandomNumbers, State, BesideTheOutput, Precision, Parameters, Inputs, Autograd, Faults)]
ALL = sorted(HAZARDS.values(), key=lambda h: THEMES.index(h.theme))
