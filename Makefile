# Two commands matter: `make demo` and `make test`. Each sets up .venv from nothing first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# pip reads these for the build environment too, so nothing there escapes the constraints.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint format bench clean setup

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/sparge demo

# The workers share the cores, one thread each; tests of threads set their own number.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --cov --cov-report=term --cov-fail-under=95

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/sparge bench

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
