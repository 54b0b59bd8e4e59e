# What a newcomer runs: `make serve` and `make test`. Everything is installed into $(VENV) the first time.
#
# Where PyTorch comes from: PyPI, whose build for Linux on x86-64 carries GPU libraries. A smaller download is
#     make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TORCH_INDEX ?=
# Tests of the drop-in run real vLLM, in an environment of its own; `make test VLLM=` does without, and skips them.
VLLM ?= 1

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# A thread of PyTorch's that has no work sleeps instead of spinning: CI machines and laptops have other work to do.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help install serve demo test lint kernels vllm format bench bench-quick soak dist clean

help:
	@echo "make serve   serve the demo model on port 8000, and print a curl that works"
	@echo "make demo    run the demo model on built-in prompts"
	@echo "make test    format check, lint, types, all tests (quick benchmarks among them)"
	@echo "make soak    the long forms of all tests, and the benchmarks in full"
	@echo "make bench   the benchmarks in full, beside vLLM in an environment of its own"
	@echo "make format  format the code and repair what the linter can"
	@echo "make dist    build what is released: dist/*.tar.gz and dist/*.whl"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$$($(PYTHON) --version) is too old: Pointsman needs Python 3.11 or later (make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_INDEX)" ]; then $(BIN)/python -m pip install -q -c constraints.txt --index-url $(TORCH_INDEX) torch; fi
	@echo "installing into $(VENV) (once; PyTorch is the large part)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[server,dev]'
	@touch $@

serve: $(INSTALLED)
	$(BIN)/pointsman serve

demo: $(INSTALLED)
	$(BIN)/pointsman generate

# Which contracts of pyproject.toml are checked; empty: all. Missing: core, circles.
CONTRACTS ?= packages integrations numpy

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache --no-logo $(CONTRACTS:%=--contract %)
	$(BIN)/mypy --strict pointsman

# Both environments are made at once: one waits for the network while the other unpacks.
test:
	@$(MAKE) --no-print-directory -j3 lint kernels $(if $(VLLM),vllm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# The CPU kernels are compiled once, or every process of the tests would begin with that.
kernels: $(INSTALLED)
	@$(BIN)/pointsman generate --json > /dev/null

vllm:
	-@$(PYTHON) benchmarks/vllm_env.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-quick: $(INSTALLED)
	$(BIN)/python benchmarks/scheduler_step.py --quick
	$(BIN)/python benchmarks/vllm_scheduler.py --quick
	$(BIN)/python benchmarks/vllm_engine.py --quick
	$(BIN)/python benchmarks/prefix_scaling.py --quick
	$(BIN)/python benchmarks/static_vs_continuous.py --quick
	$(BIN)/python benchmarks/engine_throughput.py --quick
	$(BIN)/python benchmarks/time_to_first_token.py --quick
	$(BIN)/python benchmarks/step_overhead.py --quick
	$(BIN)/python benchmarks/async_scheduling.py --quick
	$(BIN)/python benchmarks/speculation.py --quick
	$(BIN)/python benchmarks/kv_transfer.py --quick
	$(BIN)/python benchmarks/server_throughput.py --quick
	$(BIN)/python benchmarks/server_overhead.py --quick
	$(BIN)/python benchmarks/server_load.py --quick --check
	$(BIN)/python benchmarks/server_faults.py --quick --check

bench: $(INSTALLED)
	$(BIN)/python benchmarks/vllm_env.py
	$(BIN)/python benchmarks/scheduler_step.py --check
	$(BIN)/python benchmarks/vllm_scheduler.py --check
	$(BIN)/python benchmarks/vllm_engine.py --check
	$(BIN)/python benchmarks/prefix_scaling.py --check
	$(BIN)/python benchmarks/static_vs_continuous.py --check
	$(BIN)/python benchmarks/engine_throughput.py --check
	$(BIN)/python benchmarks/time_to_first_token.py --check
	$(BIN)/python benchmarks/step_overhead.py --check
	$(BIN)/python benchmarks/async_scheduling.py --check
	$(BIN)/python benchmarks/speculation.py --check
	$(BIN)/python benchmarks/kv_transfer.py --check
	$(BIN)/python benchmarks/server_throughput.py --check
	$(BIN)/python benchmarks/server_overhead.py --check

soak: lint bench
	$(BIN)/python benchmarks/server_load.py --check
	$(BIN)/python benchmarks/server_faults.py --check
	POINTSMAN_SOAK=1 $(BIN)/python -m pytest -q

# The sdist, and the wheel from it, in an environment of their own that pyproject.toml describes.
dist: $(INSTALLED)
	rm -rf dist build
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
