"""Numbers: exact integer arithmetic for the state of a reversible network. Depends on torch alone.

ratio       γ as a ratio n/d
fixed       floats as integers (fixed point)
multiply    multiplication of integers by n/d that loses nothing
buffers     which information buffers that takes, and how wide
reference   every kernel in plain torch: the definition
kernels     which implementation of the kernels runs on a tensor; the hash of any tensor
cpu         the kernels in compiled C (native compiles cpu.c)
cuda        the kernels in Triton
squeeze     space to channels
"""
