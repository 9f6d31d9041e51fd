# Two commands matter: `make demo` and `make test`. Each sets up .venv from nothing first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CPP := $(wildcard csrc/*.h csrc/*.cpp csrc/arch/*.h)
CPP_TESTS := $(wildcard csrc/tests/*.h csrc/tests/*.cpp)

# pip reads these for the build environment too, so nothing there escapes the constraints.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test docs lint format sanitize fuzz bench engines gpu-check resolve tritons wheel house clean setup

setup: $(VENV)/.done

SOURCES := pyproject.toml tools/pyproject.toml constraints.txt requirements-build.txt CMakeLists.txt \
  $(wildcard csrc/*.cmake) $(CPP)

define install
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements-build.txt
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[$(1)]" --editable "$(2)"
	touch $@
endef

$(VENV)/.done: $(SOURCES)
	$(call install,dev,./tools)

# The demo waits for what it needs and no more, unless everything is there already.
$(VENV)/.demo: $(SOURCES)
	$(call install,cli,./tools[demo])

demo: $(if $(wildcard $(VENV)/.done),setup,$(VENV)/.demo)
	$(BIN)/sparge demo

# The workers share the cores, one thread each; tests of threads set their own number.
# Then Triton's kernels, as far as they can be tested without a GPU: in the interpreter, on the backend's tests but
# for what tests/support/interpreted.py leaves out, and compiled ahead of time for every architecture. Neither may hang:
# a test that takes more than 300 s ends the interpreted run with its traceback, however slow the machine is.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --cov --cov-report=term --cov-fail-under=95
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -q \
	  -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
	timeout 900 $(BIN)/sparge bench --static

# The site, in site/. Strict: a broken link or reference fails. Nothing is fetched while it builds.
$(VENV)/.docs: $(SOURCES)
	$(call install,docs,./tools)

docs: $(if $(wildcard $(VENV)/.done),setup,$(VENV)/.docs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

SCHEMA := $(BIN)/check-jsonschema --builtin-schema

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP) $(CPP_TESTS)
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP) $(CPP_TESTS)

# The kernel tests over a build with AddressSanitizer and UndefinedBehaviorSanitizer; scripts/sanitize.sh
# says what it covers, and why there is no ThreadSanitizer.
sanitize: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/sanitize.sh

# Random calls against the reference; FUZZ_SECONDS=600 for longer, FUZZ_SEED=… for the same again.
fuzz: setup
	PYTHONPATH=tests:tests/support $(BIN)/python -m fuzz

bench: setup
	mkdir -p build
	$(BIN)/sparge bench --output build/bench.json
	$(BIN)/python -m sparge_tools.studies.targets build/bench.json

# The engines that serve many users or split one sequence, for real: vLLM, DeepSpeed, yunchang, diffusers. In an
# environment of its own, .venv-engines, because they pin other versions; scripts/engines.sh makes it.
engines:
	scripts/engines.sh

# On a machine with a GPU: set-up, the conformance suite, the benchmark and what replaces the documentation's estimates,
# as build/gpu-check.json to share. In an environment of its own, .venv-gpu; scripts/gpu_check.sh says how to choose the
# torch for AMD and Intel cards, or another version of it.
gpu-check:
	scripts/gpu_check.sh

# Whether pip can install sparge[gpu] beside each torch that sparge takes; asks the registry, installs nothing.
resolve:
	scripts/resolve.sh

# The static check with every Triton that users have, not only with the one that fits the pinned torch.
tritons: setup
	scripts/tritons.sh

# The wheels of the library (one for every Python and torch) and of its tools, tried in an empty environment.
wheel: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check_wheel.sh

# Lines, files, files of a call, import time, wheel sizes.
house: setup
	$(BIN)/python scripts/house.py

clean:
	rm -rf $(VENV) .venv-engines .venv-gpu build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
