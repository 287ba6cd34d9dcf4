# `make help` lists the targets. Everything runs in .venv (VENV), which `make venv` makes from requirements/cpu.lock.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV ?= .venv
# Address of a package index that has torch's CPU build, where pip's own index only has the CUDA one (docs/install.md).
TORCH_INDEX ?=
# More arguments for the command behind a target: make test ARGS="-k packaging"
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format lock doctor kernels-report kernels-test-gpu-pins clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-22s %s\n", $$1, $$2}' Makefile

venv: $(STAMP) ## make $(VENV) and install everything that is pinned, then this package

$(STAMP): requirements/cpu.lock requirements/install.py requirements/locked.py setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	  echo "QUADS needs Python 3.11, and \`$(PYTHON)\` is not that. Install it, or say where it is: make venv PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "Making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); } || { \
	  echo "\`$(PYTHON) -m venv\` failed; on Debian and Ubuntu it needs the package python3.11-venv." >&2; exit 1; }
	@echo "Installing requirements/cpu.lock into $(VENV): 3 to 6 minutes, with little to see while pip unpacks. Nothing to do the next time"
	@$(BIN)/python requirements/install.py --torch-index "$(TORCH_INDEX)"
	@touch $(STAMP)

demo: venv ## GRPO of a small mixture-of-experts model with an NVFP4 rollout, on this machine
	$(BIN)/quads demo $(ARGS)

test: venv ## all tests, the cheap ones first
	$(BIN)/python -m pytest $(ARGS)

lint: venv ## style and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: venv ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: venv ## refresh requirements/cpu.lock from cpu.in (ARGS=--upgrade: newest versions) and show what changed
	$(BIN)/python requirements/lock.py $(ARGS)

doctor: venv ## is everything there, and which path would run
	$(BIN)/quads doctor $(ARGS)

kernels-report: venv ## what the Triton kernels compile to (needs no GPU)
	$(BIN)/python benchmarks/compile_report.py $(ARGS)

# The other Triton: a venv of its own, and a committed table of its own.
GPU_PINS := $(VENV)/gpu-pins

kernels-test-gpu-pins: ## kernel tests and report with the torch and Triton of a GPU install (needs no GPU)
	@test -x $(GPU_PINS)/bin/python || $(PYTHON) -m venv $(GPU_PINS)
	$(GPU_PINS)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/gpu-pins.txt
	$(GPU_PINS)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	TRITON_INTERPRET=1 $(GPU_PINS)/bin/python -m pytest tests/test_kernel_*.py tests/test_dispatch_kernels.py
	$(GPU_PINS)/bin/python benchmarks/compile_report.py --results benchmarks/results/triton-3.6 $(or $(ARGS),--check)

clean: ## remove build leftovers and caches, not $(VENV) and not results
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
