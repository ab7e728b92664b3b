"""The training step: a reversible network's pass forwards, and its way back.

What happens, in order, where every block is reversed:

    the pass begins           Range.begin     a fixed point that will hold its values                        range
                              State.start     x₀ as integers; v = 0                                          scheme, momentum
    each block                Frame.run       runs it under hooks that keep nothing for autograd             replay
                              Call.first      notes what its output depends on besides x                     replay, parts, extra
                              Tape.note       the tape has the call, to run it again                         tape
                              Step.forward    State.advance moves the integers; the next x, as a float       forward
    backward, last block first
                              Step.backward   Gradient.vjp: from the next tokens to the block's output       forward, gradients
      the block's own         Frame.unpack    autograd asks for a saved tensor: now the block is run again   replay
      backward                Tape.recall     half a step back (State.pull): the integers give x again       tape
                              Call.again      all is put back as it was, and the block runs                  replay
                              Checks.compare  it must have saved what it saved before                        checks
                              Tape.settle     the other half: State.recede, when the next recall comes       tape
    the first block           Tape._served    the state's hash must be that of the start; it is freed        tape

A scheme (`scheme`) says how the integers move and how gradients pass through a step, and no more. To add one, read `scheme`,
then `coupling`, then docs/extending.md. To change how blocks are run again, read the NOTEs at the head of `replay`: each is a case
that once went wrong.

The five files of a step:

scheme         what a reversible scheme is; the integers that all schemes move
momentum       the momentum scheme: one step on, one step back
forward        the pass over a stack of blocks, and its nodes in autograd's graph
replay         one run of one block that can be run again to the bit
tape           where a block's input comes from when it is run again

What an ordinary step visits besides:

gradients      the gradient of a momentum step
range          how large the values of a pass may become, and how finely they are held
checks         a replay that differs from the first run is found
extra          what a block is run with besides x: extra inputs, random numbers, autocast
parts          what a block is made of, and how that is exchanged for a replay
heap           free memory that malloc keeps, given back

And what it does not:

coupling       the two-stream scheme
sign           momentum whose γ is of random sign
residual       γ = 0: the plain network, in a pass without integers
recurrence     γ and form: what one momentum network computes
forms          forms "block" and "relu" in plain torch; an initial velocity that is not 0
kept           a block's input that was kept, in the place of the tape
between        an x between two blocks that somebody looks at, or has had
widening       a range that becomes wider within a pass
calibrate      which fixed point holds which values
again          a pass on an accelerator that left its range, run again
inside         a block that takes a gradient in its own forward
changes        what a block may change: lists, dictionaries, buffers, running statistics
inputs         what a network can be given, and be run under: everything else is refused by name
fingerprint    which elements of what a block saves are compared
deferred       errors on an accelerator, raised without waiting for it
cuda           passes captured in a graph; a backward pass on the thread of the forward pass
"""
