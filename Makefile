# Every target is self-sufficient: it creates .venv and installs from constraints.txt what it needs, where that is not
# there yet: what the demo does, and all the rest of dev where a target does more.
# `make TARGET PY=/path/to/python` uses that interpreter as it is and installs nothing.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-unit test-budgets test-catalogue test-all test-emulated test-emulated-all test-clients check test-gpu bench bench-gpu rehearse-gpu native docs clean

VENV := .venv
PY = $(VENV)/bin/python
# The first interpreter that the pinned versions in constraints.txt support.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

ifeq ($(origin PY),file)
DEMO_ENVIRONMENT := $(VENV)/.demo
ENVIRONMENT := $(VENV)/.dev
endif

# One thread per test process: two processes share the cores, and results do not hang on their number.
TEST_THREADS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
NUM_WORKERS ?= 2

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

INSTALL := $(VENV)/bin/python -m pip install --constraint constraints.txt

$(VENV)/.demo: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(INSTALL) --editable '.[dev]'
	@touch $@

demo: native ## train a ResNet-50 on digits, plain and within a budget, and compare (lightning-offload demo)
	$(PY) -m examples.demo

test: $(ENVIRONMENT) native ## run the tests (those that need a GPU are skipped without one)
	$(TEST_THREADS) $(PY) -m pytest -n $(NUM_WORKERS) --dist worksteal

# Those that train whole models, in this process or in others.
TRAINING_TESTS := docs engine fuzz zoo catalogue lightning distributed adapters callbacks examples gpu emulated_cuda

test-unit: $(ENVIRONMENT) ## run the tests that train no whole model
	$(TEST_THREADS) $(PY) -m pytest -n $(NUM_WORKERS) --dist worksteal $(TRAINING_TESTS:%=--ignore=tests/%)

test-budgets: $(ENVIRONMENT) ## hold the budget's promise at 40 budgets on each of its trainings (half an hour)
	$(TEST_THREADS) $(PY) -m tests.engine.sweep

test-catalogue: $(ENVIRONMENT) ## run all samples of torch's catalogues of ops and modules, of which test runs a share
	LIGHTNING_OFFLOAD_TESTS=all $(TEST_THREADS) $(PY) -m pytest -n $(NUM_WORKERS) --dist worksteal tests/catalogue

test-all: $(ENVIRONMENT) ## run the tests with nothing left out, of which test runs a share, in each engine (hours)
	LIGHTNING_OFFLOAD_ENGINE=native LIGHTNING_OFFLOAD_TESTS=all $(TEST_THREADS) $(PY) -m pytest -n $(NUM_WORKERS) --dist worksteal
	LIGHTNING_OFFLOAD_ENGINE=python LIGHTNING_OFFLOAD_TESTS=all $(TEST_THREADS) $(PY) -m pytest -n $(NUM_WORKERS) --dist worksteal

test-emulated: $(ENVIRONMENT) ## run a share of the GPU tests on an emulated device (skipped without a C++ compiler)
	$(PY) -m tests.emulated_cuda --jobs $(NUM_WORKERS)

test-emulated-all: $(ENVIRONMENT) ## run all GPU tests on an emulated device, and all mutants of the stream path (hours)
	$(PY) -m tests.emulated_cuda --all --jobs $(NUM_WORKERS)

# Other people's packages have an environment of their own. One that cannot be installed is a row that says so.
CLIENTS_VENV := .venv-clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.stamp
CLIENTS_PY = $(PY)
ifeq ($(origin PY),file)
CLIENTS_ENVIRONMENT := $(CLIENTS_STAMP)
CLIENTS_PY = $(CLIENTS_VENV)/bin/python
endif
PIP_FOR_CLIENTS := $(CLIENTS_VENV)/bin/python -m pip install --constraint benchmarks/clients/constraints.txt

$(CLIENTS_STAMP): pyproject.toml benchmarks/clients/constraints.txt benchmarks/clients/requirements.txt
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(PIP_FOR_CLIENTS) torch
	$(PIP_FOR_CLIENTS) --editable '.[accelerate,numba,transformers]'
	while read -r packages; do $(PIP_FOR_CLIENTS) $$packages || echo "not installed: $$packages"; done \
		< benchmarks/clients/requirements.txt
	@touch $@

# Some of them: make test-clients CLIENTS="llama unet"
CLIENTS ?=

test-clients: $(CLIENTS_ENVIRONMENT) ## train by other people's packages within budgets, and with a finder of the batch size (20 minutes)
	$(TEST_THREADS) $(CLIENTS_PY) -m benchmarks.clients $(CLIENTS)

check: $(ENVIRONMENT) ## format, lint, types, import layers, spelling, doctests
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as main; main()'
	$(PY) -m codespell_lib
	$(PY) -m pytest --doctest-modules lightning_offload || test $$? -eq 5  # 5: no doctest found

# A part of them: make test-gpu GPU_TESTS="tests/gpu/test_races.py -k lstm"
GPU_TESTS ?= tests/gpu
NUM_GPU_WORKERS ?= 4

test-gpu: $(ENVIRONMENT) ## run the tests that need a GPU
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest -m gpu -q -p no:cacheprovider \
		-n $(NUM_GPU_WORKERS) --dist worksteal $(GPU_TESTS) || test $$? -eq 5  # 5: no test is marked gpu

native: $(DEMO_ENVIRONMENT) ## build the native core of planned steps into the user's cache, where there is a C++ compiler
	$(PY) -m lightning_offload.cli build-native || echo "planned steps run in Python"

bench: $(ENVIRONMENT) ## measure the overhead against plain training
	$(PY) -m benchmarks overhead

# Goes on where the last call stopped; a machine without git may be told the commit by BENCHMARK_COMMIT.
MINUTES ?= 9

bench-gpu: $(ENVIRONMENT) ## measure everything on a GPU, the most valuable first, for MINUTES=9
	$(PY) -m benchmarks gpu --minutes $(MINUTES)

rehearse-gpu: $(ENVIRONMENT) ## run test-gpu and bench-gpu on an emulated device, tiny (an hour)
	$(PY) -m tests.emulated_cuda --rehearse --jobs $(NUM_WORKERS)

docs: $(ENVIRONMENT) ## run the code in README.md and docs, check their spelling, and build the site into build/site
	$(TEST_THREADS) $(PY) -m pytest -n $(NUM_WORKERS) tests/docs tests/test_readme.py
	$(PY) -m codespell_lib README.md CHANGELOG.md CONTRIBUTING.md docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

clean: ## remove what the targets made, the environment included
	rm -rf $(VENV) $(CLIENTS_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
