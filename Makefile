# make demo    set up, build a bundle from the trained checkpoint, serve it, recommend (no GPU needed)
# make test    set up, check the code, run the tests
PYTHON ?= python3
# The CPU build of this version is small where a CPU index is configured; any torch >= 2.11 serves.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_DIR ?= .demo
# Test processes; a file's tests stay in one.
WORKERS ?= auto

.PHONY: demo test lint typecheck loadtest readme setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "loka-serve needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev,loadtest,examples]'
	touch $@

demo: setup
	$(BIN)/python -m examples.groceries.demo --work-dir $(DEMO_DIR) $(ARGS)

test: setup lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile $(ARGS)

lint: setup typecheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; fi

# mypy does not follow setuptools' package-dir mapping, so it gets a folder of links laid out as the package imports.
typecheck: setup
	rm -rf build/typed && mkdir -p build/typed/loka_serve
	ln -s $(CURDIR)/loka_serve/* build/typed/loka_serve/
	ln -s $(CURDIR)/kernels $(CURDIR)/engines build/typed/loka_serve/
	cd build/typed && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p loka_serve

# Rewrites the tables of the README from committed results.
readme: setup
	$(BIN)/python -m benchmarks.readme_tables

# Needs a running server (make demo ARGS=--keep) and its histories.
loadtest: setup
	LOKA_HISTORIES=$(DEMO_DIR)/data/histories.jsonl $(BIN)/locust -f loadtest/locustfile.py --headless \
	  --host http://127.0.0.1:8000 --users 8 --spawn-rate 8 --run-time 30s $(ARGS)

clean:
	rm -rf $(VENV) $(DEMO_DIR) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
