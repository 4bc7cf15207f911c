# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
BIN = .venv/bin
READY = .venv/ready

.PHONY: setup demo test lint bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/segcal demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/evaluate.py

clean:
	rm -rf .venv build src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
