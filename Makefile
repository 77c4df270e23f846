# Everything runs in .venv, made from constraints.txt (versions known to work together).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What serving needs, and with it what the tests need.
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
FRAMEWORKS := tests/clients/frameworks/.installed
# While clients are fetched, what is written here is checked.
MAKEFLAGS += --jobs=2

.PHONY: setup run test test-long test-lowest test-gpu bench-parallel lint clients clean

setup: $(STAMP)

$(SERVING): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing what serving needs into $(VENV): PyTorch first, built for CUDA some 3 GB, which takes minutes."
	$(BIN)/python -m pip install --constraint constraints.txt --editable .
	touch $@

$(STAMP): $(SERVING)
	@echo "Installing what the tests need into $(VENV)."
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

run: $(SERVING)
	$(BIN)/strata serve

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/floors.py

# Clients that the tests run besides the one in .venv. Where npm is not, or reaches no registry, those in JavaScript are left
# out and their tests are skipped.
clients: setup $(FRAMEWORKS)
	@echo "Installing clients of others, which are tested against the server."
	-command -v npm >/dev/null && npm install --prefix tests/clients/npm --no-package-lock --ignore-scripts --no-audit --no-fund --fetch-retries=0 --fetch-timeout=30000 --silent
	$(BIN)/python -m pip install --quiet --upgrade --target tests/clients/openai2 --no-deps 'openai==2.54.0' distro

$(FRAMEWORKS): tests/clients/frameworks.txt | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --target $(@D) --no-deps --no-compile --requirement $<
	touch $@

# Examples of property tests are the same each time; pytest by itself draws others.
test: lint clients
	$(BIN)/pytest --numprocesses 3 --dist worksteal --hypothesis-profile ci

# What takes long and is tested by a short form as well: training that teaches, rounds of kills, all cases of all kernels.
test-long: setup
	$(BIN)/pytest --numprocesses 3 --dist worksteal --hypothesis-profile ci -m long

# A part of the tests with the lowest versions that pyproject.toml allows, in an environment of its own: minutes, most of
# them pip's. Those that compare with transformers are left out, whose versions need newer tokenizers.
LOWEST_TESTS = tests/engine/test_builtin.py tests/engine/grammars tests/serve/api tests/serve/observe tests/serve/http/test_errors.py \
  tests/serve/test_run_batch.py tests/cli/test_help.py tests/cli/test_train.py tests/cli/test_train_data.py tests/files tests/train/test_log.py
test-lowest: setup
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(BIN)/python tools/lowest.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --constraint $(LOWEST)/lowest.txt --editable '.[log,parquet,tracing]' pytest hypothesis httpx openai
	$(LOWEST)/bin/python -m pytest $(LOWEST_TESTS)

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
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
