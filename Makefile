# `make train` and `make test` need Python 3.11 or newer and make; everything else they install into .venv.
PYTHON ?= python3
# Tests at once. Each one computes in a single thread.
JOBS ?= 2
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
# Two names for one thing: pip up to 25.2 reads the first for build requirements too, later ones read the second.
PIP_ENV := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

# Threads that wait by spinning take the core that the embedded server needs: a step then takes eight times as long.
export OMP_WAIT_POLICY := passive

.DEFAULT_GOAL := help
.PHONY: help install train test test-all bench check format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

install: $(STAMP) ## build .venv from pyproject.toml and constraints.txt (again only when one of them changes)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ckpt-tasks needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_ENV) $(BIN)/python -m pip install --quiet --editable '.[dev,bench]'
	@touch $@

train: install ## train the byte-level model; the same command again goes on (ARGS="--steps 2000 …")
	$(BIN)/python -m flows.train $(ARGS)

check: install ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install ## rewrite the sources as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: check ## check, then every test that is not marked slow
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

test-all: check ## check, then every test, the long forms too
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

bench: install ## print the figures beside torch.save, safetensors and DCP
	$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove .venv and every cache; runs/ is kept: it holds your checkpoints
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
