"""Growth of the resident memory of a fresh process by one training step, as the system counts it.

PyTorch's allocator does not see what libraries and Python take by themselves, nor what the C library cannot reuse. Model, data,
gradients and libraries are there before the step: a warm-up on two rows of the batch has seen to that.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import torch

from .cases import cases
from .methods import Setup, method
from .step import training_step, zero_gradients

_STATUS = Path("/proc/self/status")


def growth(case: str, size: str, written: str, gamma: float) -> int:
    """Measured in a process of its own."""
    command = [sys.executable, "-m", __name__, case, size, written, str(gamma)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures resident memory failed:\n{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def measured(name: str, size: str, written: str, gamma: float) -> int:
    """Measured here."""
    (case,) = cases(size, [name])
    torch.manual_seed(0)
    network, chosen = case.network(), method(written)
    setup = Setup(case, network, gamma, "inductor")
    x = case.inputs(case.batch, "cpu")
    zero_gradients(setup, x)
    net = chosen.build(setup)
    training_step(chosen, net, x[:2].detach().clone(), case)()
    start = resident(reset=True)
    training_step(chosen, net, x, case)()
    return resident(peak=True) - start


def resident(peak: bool = False, reset: bool = False) -> int:
    """Resident bytes of this process, now or at most.

    On Linux a child inherits its parent's ru_maxrss. /proc has the child's own.
    """
    if not _STATUS.exists():
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most * (1 if sys.platform == "darwin" else 1024)
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    print(measured(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
