# make run: sets everything up and trains --config=8k:tiny.   make test: the same set-up, then the tests.
# PYTHON chooses the interpreter (3.11 or newer), VENV the folder of its virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test lint clean

# Huge pages for malloc (Linux): XLA:CPU takes fresh memory every step, and page faults cost a fifth.
run: $(VENV)/.installed
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m experiments.launch --config=8k:tiny

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv* build *.egg-info
