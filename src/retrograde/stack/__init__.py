"""One pass over a stack of blocks: what it remembers, in which range, at what cost.

forward     the pass itself, in each memory mode
calibrate   the fixed-point range, kept in step with the activations
planner     what each memory mode keeps
"""
