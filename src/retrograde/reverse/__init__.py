"""The training step: a reversible network's pass forwards, and its way back. Read it in this order:

scheme         what a reversible scheme is; the integers that all schemes move
momentum       the momentum scheme: one step on, one step back, the gradient of a step
nodes          autograd nodes: tokens carry gradients, integers carry values
forward        the pass over a stack of blocks
replay         one run of one block that can be run again to the bit
tape           where a block's input comes from when it is run again

coupling       the two-stream scheme; residual: γ = 0; sign: momentum whose γ is of random sign
range          how large values may become, and how finely they are held
checks         a replay that differs from the first run is found
deferred       errors on an accelerator, raised without waiting for it
extra          the inputs besides x, and copies of containers
parts          what a block is made of; surroundings: random numbers, autocast and thread, put back around a replay
heap           free memory that malloc keeps, given back
inputs         what a network can be given, and be run under
"""
