# `make demo` and `make test` do all set-up themselves, in .venv, and are quick the second time.
PYTHON ?= python3
BIN := .venv/bin
NUMBERS := $(addprefix tests/,$(addsuffix .py,test_tensors learner/test_optimisation merging/test_one_a merging/test_operators \
  merging/test_average research/methods/test_inflora classifiers/test_drift classifiers/test_classifiers \
  data/test_transforms vit/test_vit)) tests/research/runs/test_runs.py::test_golden_record
# uv downloads and unpacks in parallel, but ignores pip's configuration: with an index or --no-index set there, or if uv
# fails, pip installs. Neither compiles the 23,000 files, of which a tenth is ever imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
OWN_INDEX := $(BIN)/python -m pip config list | grep -E '\.(no-)?index' > /dev/null
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-gpu test-browser test-settings lint types doctests unit numbers slow format results docs clean

demo: .venv/.core
	$(BIN)/onea demo

test: .venv/.dev
	@$(MAKE) --no-print-directory -j2 types doctests lint
	@$(MAKE) --no-print-directory unit numbers

lint: .venv/.dev
	$(BIN)/ruff check src tests tools docs benchmarks
	$(BIN)/ruff format --check src tests tools docs benchmarks
	$(BIN)/lint-imports --no-cache
	$(BIN)/pylint --disable=all --enable=duplicate-code --min-similarity-lines=10 --score=no src/onea

types: .venv/.dev
	$(BIN)/mypy

# With the fixtures of conftest.py, in one process, so that compiled libraries are built once.
doctests: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/conftest.py src

unit: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist worksteal tests

# Tests that depend on rounding, with the instructions of an old CPU only.
numbers: .venv/.dev
	$(BIN)/python tests/support/settings.py parallel+old-cpu -- $(NUMBERS)

# The suite under every setting of tests/support/settings.py, in an hour or two; ONLY="old-cpu shuffled" takes some of them.
test-settings: .venv/.dev
	$(BIN)/python tests/support/settings.py $(ONLY)

slow: .venv/.dev
	$(BIN)/python -m pytest -q --slow -m slow

test-gpu: .venv/.dev
	TEST_ON_GPU=1 $(BIN)/python -m pytest -q -rs tests/gpu

test-browser: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m browser tests/serve

format: .venv/.dev
	$(BIN)/ruff check --fix src tests tools docs benchmarks
	$(BIN)/ruff format src tests tools docs benchmarks

# Writes the results of the committed records into all pages; MADE=folder collects the records of finished runs first.
results: .venv/.dev
	$(BIN)/python tools/docs/fill.py $(if $(MADE),--made $(MADE))
	@$(MAKE) --no-print-directory docs

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

clean:
	rm -rf .venv build dist site

.venv/bin/pip:  # and not python, which a venv that failed for want of python3-venv leaves behind
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'onea needs Python 3.11 or newer; set PYTHON=...')"
	$(PYTHON) -m venv .venv

.venv/.core: pyproject.toml constraints.txt | .venv/bin/pip
	! $(OWN_INDEX) && $(PIP) --only-binary uv uv && $(UV) -e '.[research]' || $(PIP) -e '.[research]'
	touch $@

# In one step: installing the core first would resolve and build twice.
.venv/.dev: pyproject.toml constraints.txt | .venv/bin/pip
	! $(OWN_INDEX) && $(PIP) --only-binary uv uv && $(UV) -e '.[dev]' || $(PIP) -e '.[dev]'
	touch .venv/.core $@
