# Two commands do everything on a machine that holds only Python and this repository:
#   make train   set up .venv, train on TFBind8 on the CPU, write a report
#   make test    set up .venv, lint, type-check, run the tests of daily work
# and these:
#   make test-all   the same with the slow tests, and with types checked at each call
#   make test-numpy2  the tests of daily work with NumPy 2, which torchgfn does not allow
#   make test-nightly  the tests of buffers with TorchRL's and tensordict's nightly versions
#   make test-cuda  the tests that need a CUDA device, skipped where there is none
#   make figures    measure in ten CPU minutes what README and docs/ tell; print what has changed
#   make docs       set up .venv, build docs/ into site/
PYTHON ?= python3
VENV := .venv
NIGHTLY ?= torchrl-nightly==2026.10.27 tensordict-nightly==2026.10.26
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
ARGS ?=

.PHONY: train test test-all test-cuda test-nightly test-numpy2 lint types tests bench figures docs images clean

train: $(VENV)/.train
	$(BIN)/gfn-rb train tfbind8 $(ARGS)

test: lint types tests

test-all: ARGS += --all
test-all: test

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# With bytecode on disk, or each interpreter that the tests start compiles the package and the tests.
tests: export PYTHONDONTWRITEBYTECODE =
tests: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(ARGS)
	$(BIN)/python -m pytest tests/device $(ARGS)

test-numpy2: export PYTHONDONTWRITEBYTECODE =
test-numpy2:
	$(MAKE) VENV=.venv-numpy2 .venv-numpy2/.numpy2
	.venv-numpy2/bin/python -m pytest -n 2 $(ARGS)

test-nightly: export PYTHONDONTWRITEBYTECODE =
test-nightly:
	$(MAKE) VENV=.venv-nightly .venv-nightly/.nightly
	.venv-nightly/bin/python -m pytest -n 2 $(ARGS) tests/writers tests/samplers tests/buffers tests/containers tests/checkpoint

test-cuda: $(VENV)/.test
	$(BIN)/python -m pytest -m cuda $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.local

figures: $(VENV)/.bench
	$(BIN)/python -m benchmarks.figures $(ARGS)

# Not --quiet, which hides warnings from --strict. Material says on every build that there will be a
# MkDocs 2.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# The pictures that are drawn from what is kept; docs/benchmarks.md tells what runs for the others.
images: $(VENV)/.bench
	$(BIN)/python tools/structure.py --draw docs/architecture.png
	$(BIN)/python -m benchmarks.published page
	$(BIN)/python -m benchmarks.distributed_learning --redraw

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip  # Debian 12's takes minutes for a second extra
	touch $@

$(VENV)/.train $(VENV)/.test $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) --editable '.[$*]'
	touch $@

$(VENV)/.numpy2: $(VENV)/.test
	$(BIN)/python -m pip uninstall --quiet --yes torchgfn
	$(BIN)/python -m pip install --quiet --upgrade 'numpy>=2'
	touch $@

# They are distributions of other names: pip would leave both in one folder.
$(VENV)/.nightly: $(VENV)/.test
	$(BIN)/python -m pip uninstall --quiet --yes torchrl tensordict
	$(PIP) $(NIGHTLY)
	touch $@

clean:
	rm -rf $(VENV) .venv-nightly .venv-numpy2 site
