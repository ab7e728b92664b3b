# `make demo` and `make test` do all their own set-up: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV   ?= .venv
READY  := $(VENV)/.ready
BIN    := $(VENV)/bin

.PHONY: demo test check fuzz bench-cpu bench-smoke clean

demo: $(READY)          ## train one network three ways on real digits; table and figure
	$(BIN)/retrograde demo

test: $(READY)          ## every test
	$(BIN)/python -m pytest -n 2 --dist loadfile

fuzz: $(READY)          ## random networks for an hour, reverse against stored, bit for bit
	$(BIN)/python tests/fuzz/run.py --minutes 60

check: $(READY)         ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-cpu: $(READY)     ## step time and peak memory against checkpointing, on this machine's CPU
	$(BIN)/retrograde bench --size cpu

bench-smoke: $(READY)   ## every method of the benchmark on small networks
	$(BIN)/retrograde bench --size smoke --without compile

$(READY): pyproject.toml experiments/pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e ".[dev]" -e ./experiments
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
