"""The trainer: `retrograde train`, and what the experiments on images train with.

setting       what is trained, on what, how; as options of the command line
models        networks by name
schedule      the learning rate, a function of the step alone
learner       a network and its optimizer: one step, an evaluation, and all of their state
fit           the epochs; a watcher logs and saves
parallel      DDP and FSDP2 under torchrun
checkpoints   whole or not at all, verified, the last few kept
logs          JSON lines, TensorBoard, a live line
run           `retrograde train` itself: a folder with all of the above
"""

from .fit import fit
from .learner import Learner
from .models import build
from .setting import Recipe, Setting

__all__ = ["Learner", "Recipe", "Setting", "build", "fit"]
