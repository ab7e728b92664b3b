"""One training step, many ways to remember: time and memory of each, in one interleaved run. See docs/benchmark.md.

command.py    `retrograde bench`
notation.py   how a method is written
methods.py    how a stage is run: twelve baselines by name, ours by description
peers.py      the same networks by other packages
networks.py   the networks: stem, stages of blocks, tail; one set of weights for every method
cases.py      which network, batch, precision
compiling.py  blocks run by a compiled function
step.py       one training step as a function; gradient check; largest batch
runner.py     all methods of a case in turns -> rows
resident.py   memory of a step as the system counts it
record.py     a row, and the table of results
show.py       tables for people
draw.py       the scatter plot
bits.py       bytes held per element and layer, against the ideal
page.py       the tables of docs/benchmark.md
inside.py     what happens inside a step: allocations at the peak, kernels, the host
accuracy.py   errors against a recurrence of higher precision
predict.py    predicted against measured memory
"""
