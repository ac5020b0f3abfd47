# make quickstart   the whole story on real photographs (sets everything up first)
# make test         the tests, real engines at small size; make test-all runs the slow suites too, make test-share a part of them
# make check        format, lint, types, import contract
# make docs         the site in docs/_build; a warning is an error
# make gpu-check    what only a GPU shows: tests, rates and memory; without one, a line that says so
PYTHON ?= python3
MAKEFLAGS += --no-print-directory
BIN := .venv/bin
export RAY_AUTH_MODE := token
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: quickstart test test-share test-all check docs gpu-check format install clean

quickstart: .venv/ready
	@$(BIN)/raypipe quickstart --json

# Two processes: what may use the Ray cluster runs in one of them. More threads than cores only wait for each other.
test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not chaos and not spark and not cloud and not gpu and not slow"

test-share: .venv/ready
	$(BIN)/python -m pytest -n 2 -m "not spark and (share or (cloud and not slow))"
	$(BIN)/python -m pip install --quiet --constraint infra/constraints.txt --editable '.[spark,hf]'
	$(BIN)/python -m pytest tests/models/test_providers.py
	$(BIN)/python -m pytest -m "spark and share"

test-all: .venv/ready
	$(BIN)/python -m pip install --quiet --constraint infra/constraints.txt --editable '.[spark,hf]'
	$(BIN)/python -m pytest

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m raypipe.cli.reference --check

docs: .venv/ready
	@$(BIN)/python -c 'import sphinx, furo, myst_parser' 2> /dev/null || $(BIN)/python -m pip install --quiet --constraint infra/constraints.txt --editable '.[docs]'
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs -b html . docs/_build
	@echo docs/_build/docs/index.html

gpu-check: .venv/ready
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(BIN)/python -m pytest -m gpu; fi
	@$(BIN)/python -m benchmarks.gpu --json

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: .venv/ready

# `make PYTHON=python3.12 …` with a .venv of another Python: it is made anew.
ifeq ($(origin PYTHON),command line)
ifneq ($(wildcard .venv/bin/python),)
VERSION_OF = $(shell $(1) -c 'import sys; print(*sys.version_info[:2])')
ifneq ($(call VERSION_OF,$(PYTHON)),$(call VERSION_OF,.venv/bin/python))
CLEAR := --clear
.PHONY: .venv/ready
endif
endif
endif

# The sidecars (fastdup, Alibi Detect) are built here too, so that the first run does not wait for them.
.venv/ready: pyproject.toml infra/constraints.txt raypipe/cluster/sidecars/fastdup.txt raypipe/cluster/sidecars/alibi.txt
	@$(PYTHON) -c 'import sys; sys.exit("raypipe needs Python 3.11-3.13, this is " + sys.version.split()[0] + ". Say which: make PYTHON=python3.11 …" if not (3, 11) <= sys.version_info < (3, 14) else 0)'
	$(PYTHON) -m venv $(CLEAR) .venv
	$(BIN)/python -m pip install --quiet --constraint infra/constraints.txt --editable '.[quickstart,deepspeed,optuna,onnx,serve,dev]'
	$(BIN)/raypipe sidecars
	@touch $@

# Caches and what was built. Runs hold tables and models, and stay.
clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis docs/_build dist/databricks
