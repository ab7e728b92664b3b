"""The exact core: integers in, bits back. Depends on torch alone; read in one sitting.

    rational     γ as n/d, the bounded information buffer
    fixedpoint   floats as integers
    multiply     multiplication by n/d that loses nothing
    ops          the integer steps, as operators
    momentum     the state of a network, one step on and one step back
    graph        autograd nodes: tokens carry gradients, integers carry values
    call         one run of one block, repeatable to the bit
    verify       proof that it was repeated
    tape         where the state stands, and replay

`retrograde.stack` runs blocks with it, and `retrograde.nets.MomentumNet` is the module on top.
"""
