# Everything runs in .venv, made from constraints.txt (versions known to work together).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := tests/clients/frameworks/.installed
# While clients are fetched, what is written here is checked.
MAKEFLAGS += --jobs=2

.PHONY: setup run test test-gpu bench-parallel lint clients clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet 'triton==3.6.0; platform_system == "Linux"'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

run: setup
	$(BIN)/strata serve

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/floors.py

# Clients that the tests run besides the one in .venv. Where npm is not, or reaches no registry, those in JavaScript are left
# out and their tests are skipped.
clients: setup $(FRAMEWORKS)
	-command -v npm >/dev/null && npm install --prefix tests/clients/npm --no-package-lock --ignore-scripts --no-audit --no-fund --silent
	$(BIN)/python -m pip install --quiet --upgrade --target tests/clients/openai2 --no-deps 'openai==2.54.0' distro

$(FRAMEWORKS): tests/clients/frameworks.txt | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --target $(@D) --no-deps --no-compile --requirement $<
	touch $@

# Examples of property tests are the same each time; pytest by itself draws others.
test: lint clients
	$(BIN)/pytest --numprocesses 3 --dist worksteal --hypothesis-profile ci

# tests/gpu on all GPUs that are here, or those of CUDA_VISIBLE_DEVICES; a few files: make test-gpu FILES="engine moe".
# Another Python that has all that the tests import does without .venv: make test-gpu PYTHON=python3
ifeq ($(origin PYTHON),command line)
test-gpu:
	$(PYTHON) tools/gpu_tests.py $(FILES)
else
test-gpu: setup
	$(BIN)/python tools/gpu_tests.py $(FILES)
endif

# Models on 1, 2, 4, 8 GPUs, up to GPUS (all that are here): make bench-parallel GPUS=8 MODELS=8B,70B. Goes on where it was
# interrupted; another Python as above.
PARALLEL = bench parallel --device cuda $(if $(GPUS),--ranks $(GPUS)) $(if $(MODELS),--models $(MODELS))
ifeq ($(origin PYTHON),command line)
bench-parallel:
	$(PYTHON) -m strata $(PARALLEL)
else
bench-parallel: setup
	$(BIN)/strata $(PARALLEL)
endif

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
