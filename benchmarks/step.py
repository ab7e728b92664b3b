"""Training steps, method against method: time and peak memory in one interleaved run. See docs/benchmark.md.

python benchmarks/step.py run --size smoke                 # small networks on a CPU, in seconds
python benchmarks/step.py run --cases transformer          # on a GPU, the networks themselves
python benchmarks/step.py report out/bench/step.csv        # table, Markdown, scatter plot
python benchmarks/step.py page                             # into docs/benchmark.md
"""

from retrograde_bench.commands import main, prepare

if __name__ == "__main__":
    prepare()
    main()
