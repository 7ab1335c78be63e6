# Everything here works from a fresh clone: each target first makes the virtual environment it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

# On machines without a GPU, torch from PyPI cannot be imported (its CUDA libraries are not in the lock);
# then the same version is taken from here.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps

# Quick kinds first, so that a broken store shows before an engine starts.
QUICK := $(wildcard tests/unit tests/property tests/conformance tests/stateful tests/faults)
REAL  := $(wildcard tests/engine tests/gpu)

.DEFAULT_GOAL := help
.PHONY: help run test test-quick test-engine lint bench venv clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

run: $(STAMP) ## the demo: a real engine with and without kvfold, on this machine
	$(BIN)/kvfold demo

test: $(STAMP) ## all tests: unit, property, stateful and fault tests, then real engines
	$(BIN)/python -m pytest $(QUICK) $(REAL)

test-quick: $(STAMP) ## the tests that start no engine
	$(BIN)/python -m pytest $(QUICK)

test-engine: $(STAMP) ## the tests that start real engines
	$(BIN)/python -m pytest $(REAL)

lint: $(STAMP) ## ruff, mypy --strict and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## measure, and compare each figure with its aim
	$(BIN)/python bench/run.py

venv: $(STAMP) ## the virtual environment, with the pinned engine

$(STAMP): requirements/engine.txt requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "kvfold needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)."; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] engine (a minute or two; about 4 GB on disk)"
	@$(PIP) -r requirements/engine.txt
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	    $(PIP) --force-reinstall --index-url $(TORCH_CPU_INDEX) "$$(grep '^torch==' requirements/engine.txt)"
	@echo "[3/4] tools for tests, lint and the demo"
	@$(PIP) -r requirements/dev.txt
	@echo "[4/4] kvfold itself"
	@$(PIP) --no-build-isolation -e .
	@touch $@

clean: ## remove the environment, caches and outputs
	rm -rf $(VENV) .cache out .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
