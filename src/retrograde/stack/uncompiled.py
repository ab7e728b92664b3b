"""What `torch.compiler.disable` does, without importing the compiler, which takes longer than all the rest of this package."""

import torch

uncompiled = torch._disable_dynamo  # imports it when the function is first called
