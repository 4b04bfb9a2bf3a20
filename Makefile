# Two commands do everything on a machine that holds only Python and this repository:
#   make train   set up .venv, train on TFBind8 on the CPU, write a report
#   make test    set up .venv, lint, type-check, run the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
ARGS ?=

.PHONY: train test lint types tests bench clean

train: $(VENV)/.train
	$(BIN)/gfn-rb train tfbind8 $(ARGS)

test: lint types tests

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# With bytecode on disk, or each interpreter that the tests start compiles the package and the tests.
tests: export PYTHONDONTWRITEBYTECODE =
tests: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.local

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.train $(VENV)/.test $(VENV)/.bench: $(VENV)/.%: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV)
