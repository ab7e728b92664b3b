"""The exact core: integers in, bits back. Depends on torch alone; read in one sitting.

    rational     γ as n/d
    fixedpoint   floats as integers
    multiply     multiplication by n/d that loses nothing
    ops          the integer steps, as operators
    parts, rng   what a block is made of, and what it draws
    call         one run of one block, repeatable to the bit
    verify       proof that it was repeated
    tape         where a reversible state stands, and replay

`retrograde.stack` runs a momentum network's blocks with it; `retrograde.nets.momentum` is the module on top.
"""
