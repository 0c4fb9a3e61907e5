# The entry points of the project: `make help` lists them.

PYTHON ?= python3
JOBS = 2
ARGS =

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup train test lint types format clean

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1 - /p' Makefile

setup: $(STAMP) ## create .venv with the package and everything the tests need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "latentcot needs Python 3.11 or newer: try make PYTHON=python3.12"; exit 1; }
	@echo "==> installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

train: $(STAMP) ## train the demo on this machine; ARGS="model.tau=0.3" overrides the recipe
	$(BIN)/latentcot train recipes/demo.yaml --run-dir runs/demo $(ARGS)

test: lint types $(STAMP) ## run everything that CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) $(ARGS)

lint: $(STAMP) ## check style, format and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

types: $(STAMP) ## check types
	$(BIN)/mypy

format: $(STAMP) ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove builds and caches (not .venv, not runs)
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
