"""A stack of blocks as a momentum network: one pass over it, what it remembers, in which range, at what cost.

momentum    the state as integers, one step on and one step back
graph       autograd nodes: tokens carry gradients, integers carry values
forward     the pass itself, in each memory mode
calibrate   the fixed-point range, kept in step with the activations
"""
