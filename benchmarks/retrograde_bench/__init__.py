"""One training step, many ways to remember: time and memory of each, in one interleaved run.

python benchmarks/step.py run --size smoke --out out/bench     # or: retrograde bench
python benchmarks/step.py report out/bench/step.csv            # table, Markdown and scatter plot, from the CSV alone
python benchmarks/step.py page                                 # figures into docs/benchmark.md

networks.py   the networks: stem, stages of blocks, tail; one set of weights for every method
cases.py      which network, batch, precision
methods.py    how a stage is run: plain, checkpointed, compiled, ours
peers.py      the same by other packages
step.py       one training step as a function; gradient check; largest batch
runner.py     all methods of a case in turns -> rows
record.py     a row, and the CSV
show.py       tables, Markdown
draw.py       the scatter plot
bits.py       bytes held per element and layer, against the ideal
page.py       docs/benchmark.md
"""
