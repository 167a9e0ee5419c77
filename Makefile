# Everything from a fresh machine that has Python and make: `make run`, `make test`.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= mwn
ARGS ?=
BIN = $(VENV)/bin
# A process a core, up to four, each with one thread; ARGS="-n 0" takes one process, for a debugger.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: run test test-all recipes lint docs docs-serve gpu-kit benchmark clean help
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */make \1: /'

run: $(VENV)/installed  ## train a recipe, by name or path: make run RECIPE=mwn ARGS="seed=1 hypergradient=cg"
	$(BIN)/mlotool run $(RECIPE) $(ARGS)

test: $(VENV)/installed-dev  ## the tests
	$(PYTEST) $(ARGS)

test-all: $(VENV)/installed-dev  ## the tests, slow ones included
	$(PYTEST) -m "slow or not slow" $(ARGS)

recipes: $(VENV)/installed-dev  ## every recipe, made small, for a few ticks; `make test` takes one of three
	$(PYTEST) -n 0 -m "slow or not slow" tests/test_recipes.py $(ARGS)

lint: $(VENV)/installed-dev  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/installed-dev  ## the documentation, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean
	@echo "build/site/index.html"

docs-serve: $(VENV)/installed-dev  ## the documentation on a local port, anew with each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# For a machine with a GPU and no network: the packages that it lacks, of Python alone, and Betty to compare with.
KIT_PYTHON = 3.12
KIT_PLATFORMS = manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
gpu-kit: $(VENV)/installed  ## what `python -m benchmarks.gpu` needs where no network is: make gpu-kit BETTY=<clone> KIT_PYTHON=3.12
	rm -rf gpu-kit && mkdir -p gpu-kit/wheels
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir gpu-kit/wheels $$($(BIN)/python -m pip freeze | grep -E '^antlr4-python3-runtime==')
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(KIT_PYTHON) --implementation cp \
	  $(KIT_PLATFORMS:%=--platform %) --dest gpu-kit/wheels $$($(BIN)/python -m pip freeze \
	  | grep -E '^(hydra-core|omegaconf|pydantic|pydantic_core|annotated-types|typing-inspection|greenlet|rich)==')
	git describe --always --dirty >gpu-kit/commit
	if [ -n "$(BETTY)" ]; then cp -r "$(BETTY)" gpu-kit/betty && rm -rf gpu-kit/betty/.git; fi

benchmark: $(VENV)/installed-dev  ## startup times of the command line
	$(BIN)/python -m benchmarks.cli_startup

clean:  ## everything that these targets made, runs excepted
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second call start at once; a changed pyproject.toml installs again. Python compiles what it
# imports, less than half of all that is there.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mlotool needs Python 3.11 or newer, but this is " + sys.version.split()[0] + "; run: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip  # older ones take longer for PyTorch

$(VENV)/installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV); PyTorch is large, this takes minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV); PyTorch is large, this takes minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	touch $@ $(VENV)/installed
