"""The two failures a training loop may want to catch."""


class RangeOverflow(ArithmeticError):
    """A value left the fixed-point range, or a block returned NaN or Inf: the forward pass is not to be trusted."""


class ReplayError(RuntimeError):
    """A block run again in backward did not repeat itself, or what it depends on was changed in between."""
