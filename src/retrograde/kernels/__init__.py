"""Faster bodies for the operators of `retrograde.core.ops`, device by device.

Importing this package registers them: `cpu` for CPU tensors, `cuda` for CUDA tensors where Triton is installed. They give
the same bits as the plain-torch bodies, so deleting the folder changes speed only.
"""

from importlib.util import find_spec

import torch

from ..core.ops import register
from . import cpu

register("cpu", "CPU", cpu.advance_, cpu.pull_, cpu.retreat_, carry=cpu.carry, digest=cpu.digest)

if torch.cuda.is_available() and find_spec("triton") is not None:
    from . import cuda

    steps = (cuda.advance_, cuda.pull_, cuda.retreat_)
    register("cuda", "CUDA", *steps, carry=cuda.carry, digest=cuda.digest, encode=cuda.encode, decode=cuda.decode)
