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
      backward                Frame.replay    runs the block again:                                          replay
                              Tape.recall     - half a step back (State.pull): the integers give x again     tape
                              Call.again      - all is put back as it was, and the block runs                replay
                              Checks.compare  - it must have saved what it saved before                      checks
                              Tape.settle     - its output is noted: the next recall finishes the step back  tape
    the first block that      Tape._served    the state's hash must be what it was there (unless verify is   tape
      saved anything                          "off"); the state is freed, unless the graph is kept

`Pass` drives all of the forward pass. On an accelerator it looks at the range once, where the pass ends (`Pass.look_back`).

Words:

x, v           the state. As integers: q = round(x·2^bits), |q| ≤ `limit`; v has `guard` bits more. See `FixedPoint` (arithmetic/fixed)
information    γ·v is n·v/d in integers. The division drops digits; the buffer keeps them for the way back (arithmetic/multiply)
  buffer
token          a tensor without storage that stands for one of the integer tensors in autograd's graph
f, y           y is what a block returns: f(x), or x + f(x), as its form says
range          the fixed point, and how large values may become. `Range` is what passes have taught; `PassRange` is one pass's
seen           by a pass: the largest |v| and |x| after each step, a row of a table

A scheme (`scheme`) says how the integers move and how gradients pass through a step, and no more. To add one, read `scheme`,
then `coupling`, which is the shortest, then docs/extending.md. What a `State` promises:

start(x0)      sets the integers that `names` lists, by `begin`, and `gradient`. v with `guard` bits more is listed in `guarded`; a
               state without such needs a range that was begun with most_guard=0
take(k, y)     moves the integers in place, by step k. Fills row k + 1 of the range with the largest |v| and |x| (`note_step`).
               Returns x of layer k + 1 as a float. Integers may pass `limit` by less than they have bits for: it is undone then
draw(k)        undoes the first half of step k in place. Returns block k's input; `getattr(state, input_name(k))` are its integers
undo(k, y, further)   undoes the second half. If `further`, returns draw(k − 1)
reach(k, f)    returns bounds of |v| and |x| after step k, for |f| up to f. The default is for steps that add f at most
rest()         returns what a network can give back besides x

The pass and the tape call advance, pull, retreat and recede. These call take, draw, undo, and undo and draw at once, in a range that
may become wider in between.

Gradients: x of layer k leaves step k − 1 twice: as a float, which goes to block k alone, and as a token, which goes to step k alone. So
`Gradient.vjp(k, tokens, d, wanted)` is given the gradients of the tokens after step k, and d, that of the float (what came back
through block k + 1). It returns those of the tokens before step k, and that of y. A gradient of a token that the step before can make
by itself may be left out (None), except in the layers that `observed` has: there somebody looks at it.

To change how blocks are run again, read the NOTEs at the head of `replay`: each is a case that once went wrong.

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
