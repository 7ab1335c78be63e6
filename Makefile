# Everything here works from a fresh clone: each target first makes the virtual environment it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp

# Older engines that kvfold supports beside the one of .venv: a lock requirements/engine-VERSION.txt and an environment
# .venv-VERSION each.
OLDER  := $(patsubst requirements/engine-%.txt,%,$(wildcard requirements/engine-*.txt))

# Compare kvfold's models with those of the latest engine; older ones have others.
LATEST := tests/unit/test_engine_shapes.py tests/engine/test_model_configs.py

# On machines without a GPU, torch from PyPI cannot be imported (its CUDA libraries are not in the lock);
# then the same version is taken from here.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

PIP := bin/python -m pip --disable-pip-version-check install --quiet --no-deps

# Quick kinds first, so that a broken store shows before an engine starts.
QUICK := $(wildcard tests/unit tests/property tests/conformance tests/stateful tests/faults)
REAL  := $(wildcard tests/engine tests/gpu)

.DEFAULT_GOAL := help
.PHONY: help run test test-quick test-engine test-full lint bench venv clean

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

test-full: export KVFOLD_TEST_FULL := 1
test-full: $(STAMP) $(OLDER:%=.venv-%/.stamp) ## all tests in their long forms (hours), with every supported vLLM
	$(BIN)/python -m pytest $(QUICK) $(REAL)
	set -e; for version in $(OLDER); do .venv-$$version/bin/python -m pytest $(QUICK) $(REAL) $(LATEST:%=--ignore=%); done

lint: $(STAMP) ## ruff, mypy --strict and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## measure, and compare each figure with its aim
	$(BIN)/python bench/run.py

venv: $(STAMP) ## the virtual environment, with the pinned engine

# $(1): folder of the environment; $(2): lock of its engine.
define build_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "kvfold needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)."; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "[1/4] virtual environment in $(1)"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "[2/4] engine (a minute or two; about 4 GB on disk)"
	@$(1)/$(PIP) -r $(2)
	@$(1)/bin/python -c 'import torch' 2>/dev/null || \
	    $(1)/$(PIP) --force-reinstall --index-url $(TORCH_CPU_INDEX) "$$(grep '^torch==' $(2))"
	@echo "[3/4] tools for tests, lint and the demo"
	@$(1)/$(PIP) -r requirements/dev.txt
	@echo "[4/4] kvfold itself"
	@$(1)/$(PIP) --no-build-isolation -e .
	@touch $(1)/.stamp
endef

$(STAMP): requirements/engine.txt requirements/dev.txt pyproject.toml
	$(call build_venv,$(VENV),$<)

.venv-%/.stamp: requirements/engine-%.txt requirements/dev.txt pyproject.toml
	$(call build_venv,.venv-$*,$<)

clean: ## remove the environments, caches and outputs
	rm -rf $(VENV) .venv-* .cache out .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
