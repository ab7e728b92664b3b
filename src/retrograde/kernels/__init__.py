"""Faster bodies for the operators of `retrograde.core.ops`, device by device.

Importing this package registers them: `cpu` for CPU tensors, `cuda` for CUDA tensors where Triton is installed. They give
the same bits as the plain-torch bodies, so deleting the folder changes speed only.
"""

from importlib.util import find_spec

import torch

from . import cpu as cpu

if torch.cuda.is_available() and find_spec("triton") is not None:
    from . import cuda

    library = torch.library.Library("retrograde", "IMPL")
    for _body in (cuda.advance_, cuda.pull_, cuda.retreat_, cuda.carry_):
        library.impl(_body.__name__, _body, "CUDA")
