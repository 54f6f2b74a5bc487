# Everything starts from `make install`, which the other targets run when it is due.
# PYTHON picks the interpreter (3.11 or newer); PIP_ARGS is handed to pip, for instance --extra-index-url with the index
# of PyTorch's CPU builds on a machine without a GPU, which saves gigabytes.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.docs-installed
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt

.PHONY: install train test test-quick soak soak-versions lint docs bench clean

install: $(STAMP)

# PyTorch goes first and alone: nothing that follows can then pull in another version of it.
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "weft needs Python 3.11 or newer; try: make install PYTHON=python3.12"; exit 1; }
	@echo "[1/3] virtual environment in .venv"
	@$(PYTHON) -m venv .venv
	@echo "[2/3] PyTorch ($$(grep '^torch==' constraints.txt))"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "[3/3] weft and its tools"
	@$(PIP) --editable '.[dev]'
	@touch $@
	@echo "done; source $(BIN)/activate puts weft on the path"

train: install
	$(BIN)/weft train recipes/quickstart.toml

# Three processes, each with whole files of tests and a pool of ranks, keep two cores busy: tests wait for files, limits and
# each other's ranks. They are forks of one that has collected all tests (tests/workers.py).
# Files begin in the order of tests/conftest.py. Hundreds of tests start processes, kill them and measure times, on cores
# that others use too: what fails is tried a second time, and named among the last lines. `make soak` does not.
# Each of those processes would compile Weft anew where the environment forbids it to keep what it has compiled.
JOBS ?= 3
test test-quick soak: export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest tests -q -p tests.workers --workers $(JOBS)

test: install
	$(PYTEST) --reruns 1 -r fER -m "not soak"

test-quick: install
	$(PYTEST) --reruns 1 -r fER -m "not slow and not soak"

# Exhaustive campaigns, for a night: what is too much for every day. The site is built as well.
soak: install $(DOCS_STAMP)
	$(BIN)/weft verify recipes/quickstart.toml --random 3000 --seed 1
	$(BIN)/python -m pytest tests -q -m soak

# The quick tests on the oldest PyTorch that pyproject.toml allows and on the newest that there is, each in an environment
# of its own. TORCH_VERSIONS asks for others, PIP_ARGS for another index, and TESTS for a few files only.
# The tested set's setuptools is too new for PyTorch 2.11, which needs one below 82.
TESTS ?= tests
TORCH_VERSIONS ?= $(shell sed -n 's/^ *"torch>=\(.*\)",$$/\1/p' pyproject.toml) newest
soak-versions: export PYTHONDONTWRITEBYTECODE :=
soak-versions:
	@for version in $(TORCH_VERSIONS); do \
		echo "== PyTorch $$version"; \
		folder=.venv-torch-$$version; \
		case $$version in newest) wanted=torch ;; *) wanted="torch~=$$version.0" ;; esac; \
		grep -vE '^(torch|setuptools)==' constraints.txt > .constraints-torch; \
		$(PYTHON) -m venv $$folder && \
		$$folder/bin/python -m pip install --quiet $(PIP_ARGS) --upgrade "$$wanted" && \
		$$folder/bin/python -m pip freeze | grep '^torch==' >> .constraints-torch && \
		$$folder/bin/python -m pip install --quiet $(PIP_ARGS) --constraint .constraints-torch --editable '.[test]' && \
		$$folder/bin/python -m pytest $(TESTS) -q -p tests.workers --workers $(JOBS) --reruns 1 -r fERs \
			-m "not slow and not soak" || exit 1; \
	done

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy weft

# The documentation as a site, which works offline: site/index.html.
$(DOCS_STAMP): pyproject.toml constraints.txt $(STAMP)
	@$(PIP) --editable '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

bench: install
	@for file in bench/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

clean:
	rm -rf .venv .venv-torch-* .constraints-torch build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find weft tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
