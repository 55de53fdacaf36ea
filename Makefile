# Everything on a fresh machine with Python 3.11+, pip and make. PYTHON chooses the interpreter: make PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch by itself and first, so that a CPU wheel is taken where there is one and no other version is considered.
TORCH ?= torch==2.13.0

.PHONY: help install demo serve test test-long test-fast crash-test soak lint types docs docs-serve check wheel clean

help:
	@echo "make demo     install, fetch the default model, answer examples/prompts.jsonl"
	@echo "make serve    install, and start the service on http://127.0.0.1:8000"
	@echo "make install  everything for development into $(VENV)"
	@echo "make test     the whole test suite"
	@echo "make test-long   the same with the long forms of campaigns: more random examples, seeds and kills"
	@echo "make test-fast   the quick tests, which need no model, compiler, database or browser"
	@echo "make wheel    a wheel for Linux on x86-64 with compiled kernels, into dist/ (two minutes, needs g++)"
	@echo "make docs     the documentation site, into build/site; make docs-serve shows it"
	@echo "make check    lint, types, documentation and tests"
	@echo "make crash-test KILLS=1000   the long form of the crash tests"
	@echo "make soak HOURS=1   the service at mixed load, with a fault every minute"

# Two stamps: a demo needs less than development does.
$(VENV)/.runtime: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[all]'
	@touch $@

$(VENV)/.development: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

install: $(VENV)/.development

demo: $(VENV)/.runtime
	@$(BIN)/batchwright models pull smollm2-135m > /dev/null
	@rm -rf demo && mkdir demo
	$(BIN)/batchwright run examples/prompts.jsonl --output demo/results.jsonl --report demo/report.json
	@$(BIN)/batchwright show demo/results.jsonl -n 6

serve: $(VENV)/.runtime
	$(BIN)/batchwright serve

# Where the environment forbids to keep compiled modules, each of the hundreds of commands that tests start compiles all.
test test-long test-fast: export PYTHONDONTWRITEBYTECODE =
test: install
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-long: install
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --long

# What needs no model, compiler, PostgreSQL, browser or npm.
FAST := $(addprefix tests/,unit limiting policies padding wire lines batcher)
test-fast: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not needs_model' $(FAST)

KILLS ?= 1000
crash-test: install
	$(BIN)/python -m tests.crash --kills $(KILLS)

HOURS ?= 1
soak: install
	$(BIN)/python -m tests.soak --hours $(HOURS) --save benchmarks/results/soak.md

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy
	@$(BIN)/python docs/readme_types.py

check: lint types docs test

# Nothing is compiled where it is installed. Its name says how old a system may be: auditwheel reads that from the code.
wheel: install
	$(BIN)/python deploy/wheel/make_wheel.py dist

# A link that leads nowhere and a public name without a docstring are errors.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
