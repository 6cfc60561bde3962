# make run   - everything from nothing to one prompt answered plain and with drafts, side by side
# make test  - lint, types and tests, as .ci/run does
# Both may be repeated and interrupted; what is already there is not done again.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
MODEL  ?= smollm2
TOKENS ?= 96
PROMPT ?= Write a Python function that adds two numbers, then a test for it.

BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
DEV       := $(VENV)/.installed-dev

.PHONY: run test docs clean

run: $(INSTALLED)
	$(BIN)/lampejo pull $(MODEL)
	$(BIN)/lampejo generate --compare --model $(MODEL) --max-tokens $(TOKENS) "$(PROMPT)"

test: $(DEV)
	$(BIN)/lampejo pull $(MODEL)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy & types=$$!; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow"; tests=$$?; \
	  wait $$types && exit $$tests

docs: $(INSTALLED)
	$(BIN)/python docs/generate_cli.py

clean:
	rm -rf $(VENV) build dist

# The stamps are touched last, so an interrupted installation is taken up again. torch comes first and by itself: TORCH
# chooses the build, for example TORCH="torch==2.13.0 --index-url ..." for one without CUDA. Most modules of what is
# installed are never imported: those that are get compiled then, which takes a minute less than to compile all.
$(INSTALLED): pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lampejo needs Python 3.11 or newer, $(PYTHON) is older; name one with make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH), which takes minutes the first time"
	$(PIP) install -qq --no-compile $(TORCH)
	$(PIP) install -qq --no-compile -e .
	@touch $@

# By name, as what is there: from its path the package would be built again, kernels included.
$(DEV): $(INSTALLED)
	$(PIP) install -qq --no-compile "lampejo[dev]"
	@touch $@
