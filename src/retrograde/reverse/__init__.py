"""The training step: a reversible network's pass forwards, and its way back. Read it in this order:

scheme         what a reversible scheme is; the integers that all schemes move
momentum       the momentum scheme: one step on, one step back; gradients: the gradient of a step
nodes          autograd nodes: tokens carry gradients, integers carry values
forward        the pass over a stack of blocks
replay         one run of one block that can be run again to the bit
tape           where a block's input comes from when it is run again; kept: an input that was kept

What an ordinary step visits besides:

range          how large the values of a pass may become, and how finely they are held
checks         a replay that differs from the first run is found
extra          what a block is run with besides x: extra inputs, random numbers, autocast
parts          what a block is made of, and how that is exchanged for a replay
heap           free memory that malloc keeps, given back

And what it does not:

recurrence     γ and form: what one momentum network computes
coupling       the two-stream scheme; residual: γ = 0; sign: momentum whose γ is of random sign
launch         an initial velocity that is not 0
widening       a range that becomes wider within a pass; calibrate: which fixed point holds which values
again          a pass on an accelerator that left its range, run again
inside         a block that takes a gradient in its own forward
containers     copies of lists, dictionaries and buffers that a block may change
inputs         what a network can be given, and be run under: everything else is refused by name
fingerprint    which elements of what a block saves are compared
deferred       errors on an accelerator, raised without waiting for it; cuda: graphs, and the thread of backward
"""
