# make test    install and run the whole quick suite        make train   install and run the main job
# make lint    ruff and pyright only                        make bench   the benchmarks
# make docs    build the documentation into site/           make docs-serve   serve it
# make browser Chromium, for the tests of the inspector's page
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,docs,lora,trl,verl,verifiers,math,webshop,gguf
BIN := $(VENV)/bin
CORE := $(VENV)/.core
READY := $(VENV)/.ready
CODE := turnwise tests examples scripts benchmarks
CONSTRAINTS := requirements/constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
# What packages are built with is pinned too.
PINS := -c $(CONSTRAINTS) --build-constraint $(CONSTRAINTS)
CPU_WHEELS := https://download.pytorch.org/whl/cpu

# Tests are small: one thread each is quicker than many, and results do not depend on the number of cores.
test test-slow test-search test-gpu test-trl bench: export OMP_NUM_THREADS ?= 1
# They start hundreds of processes, each of which would compile turnwise again.
test test-slow test-search test-gpu test-trl: export PYTHONDONTWRITEBYTECODE =
# The main job's model is small too: more than two threads would only wait for each other.
train: export OMP_NUM_THREADS ?= 2

.PHONY: install browser style types quick test test-slow test-search test-gpu test-trl lint format train bench docs docs-serve clean

install: $(READY)

# Without a GPU the CPU build of torch is taken, from whatever index pip knows, else from PyTorch's own.
$(CORE): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c $(CONSTRAINTS) -U pip setuptools
	if command -v nvidia-smi >/dev/null; then \
		$(BIN)/pip install -q -c $(CONSTRAINTS) torch==$(TORCH); \
	else \
		$(BIN)/pip install -q -c $(CONSTRAINTS) torch==$(TORCH)+cpu || \
		$(BIN)/pip install -q -c $(CONSTRAINTS) --extra-index-url $(CPU_WHEELS) torch==$(TORCH)+cpu; \
	fi
	$(BIN)/pip install -q $(PINS) -e .
	touch $@

# The main job needs the core alone; the tests also run the integrations.
$(READY): $(CORE)
	$(BIN)/pip install -q $(PINS) -e '.[$(EXTRAS)]'
	touch $@

lint: style types

style: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(READY)
	$(BIN)/pyright

# Debian's package; other systems have one of their own.
CHROMIUM = $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
SUDO = $(shell test "$$(id -u)" = 0 || command -v sudo)
browser:
	test -n "$(CHROMIUM)" || { $(SUDO) apt-get update -q && \
		$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends chromium; }

# Pyright has one thread: beside the tests, no core waits for it.
test: style
	@$(MAKE) --no-print-directory -j 2 types quick

# Two processes, a test file in one of them each, in the order of the folders: last come the doctests,
# file by file, so that both processes end at about the same time.
JOBS ?= 2
quick: $(READY)
	@test -n "$(CHROMIUM)" || echo 'no chromium: the tests of the page skip; `make browser` installs it'
	$(BIN)/pytest -m "not gpu and not slow" -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-slow: $(READY)
	$(BIN)/pytest -m "slow and not gpu"

# `make test` draws the same examples every time. This one draws new ones, RUNS times over.
RUNS ?= 10
test-search: $(READY)
	for run in $$(seq $(RUNS)); do $(BIN)/pytest -m "hypothesis and not gpu" --hypothesis-profile=search || exit 1; done

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

# The oldest and the newest TRL, from the package index.
test-trl: $(READY)
	$(BIN)/pytest -m "slow or not slow" tests/integrations/test_trl_releases.py

format: $(READY)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

train: $(CORE)
	$(BIN)/turnwise train

bench: $(READY)
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# Warnings are errors: broken links and anchors, pages that the navigation lacks, docstrings that do not parse.
# The variable silences an advertisement of mkdocs-material.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

ADDRESS ?= 127.0.0.1:8000
docs-serve: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr $(ADDRESS)

clean:
	rm -rf site $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
