# make demo    a fresh environment in .venv, then the three steps on the embedded default
# make test    a fresh environment in .test-venv, then lint, types and tests
# make check   lint, types and tests in the current environment
# make test-jobs     whole commands, and jobs of several processes; CI runs these with `make test`
# make test-faults   the faults that take long: kills at random instants, lost machines, every pair of layouts
# make test-grid     the kernels for GPUs: all cases, planted faults, every architecture; every
#                    family of models of transformers; every stage, family and format; kernels for
#                    ARM where g++-aarch64-linux-gnu and qemu-user are installed
# make test-serve    the server under hundreds of clients that leave, and 20,000 fuzzed requests
#
# PYTHON chooses the interpreter: make demo PYTHON=python3.12
# TORCH chooses the build of torch, as pip takes it. The default is what your package index gives,
# which on Linux may be the CUDA build, gigabytes of it. Without a GPU, with the address of the CPU
# builds that PyTorch's installation page gives:
#   make demo TORCH="torch==2.13.0 --index-url ADDRESS"

PYTHON ?= python3
TORCH ?= torch==2.13.0
OUTPUT ?= output
CI_TIERS = not faults and not grid and not serve
TIERS ?= not jobs and $(CI_TIERS)
# Files in the order of tests/conftest.py, not those with the most tests first.
WORKERS = --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-jobs test-faults test-grid test-serve check

demo:
	$(call install,.venv,.[serve])
	.venv/bin/python train.py --output-dir $(OUTPUT) --resume
	@echo "The report is in $(OUTPUT)/report.html"
	@echo "Chat, compare and rate: .venv/bin/python -m inference.serve --run $(OUTPUT)"

test:
	$(call install,.test-venv,.[dev],--no-compile)
	PATH="$(CURDIR)/.test-venv/bin:$$PATH" $(MAKE) check

test-jobs: export PYTHONDONTWRITEBYTECODE =
test-jobs:
	$(call install,.test-venv,.[dev],--no-compile)
	.test-venv/bin/python -m pytest $(WORKERS) -m "jobs and $(CI_TIERS)"

test-faults: export PYTHONDONTWRITEBYTECODE =
test-faults:
	$(call install,.test-venv,.[dev],--no-compile)
	.test-venv/bin/python -m pytest -m faults

test-grid: export PYTHONDONTWRITEBYTECODE =
test-grid:
	$(call install,.test-venv,.[dev],--no-compile)
	.test-venv/bin/python -m pytest -m grid

test-serve: export PYTHONDONTWRITEBYTECODE =
test-serve:
	$(call install,.test-venv,.[dev],--no-compile)
	.test-venv/bin/python -m pytest -m serve

# Bytecode is kept, whatever the environment says: the tests start hundreds of processes. Pyright
# runs while the first tests do.
check: export PYTHONDONTWRITEBYTECODE =
check:
	ruff check .
	ruff format --check .
	pyright & types=$$!; python -m pytest $(WORKERS) -m "$(TIERS)"; tests=$$?; \
		wait $$types && exit $$tests

# torch comes first and alone, so that nothing else decides its build. $(3) are further options of pip:
# the tests compile the modules that they import, a quarter of all.
define install
	$(PYTHON) -m venv --clear $(1)
	grep -v '^torch==' requirements.lock > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet $(3) --constraint $(1)/constraints.txt $(TORCH)
	$(1)/bin/python -m pip install --quiet $(3) --constraint $(1)/constraints.txt --editable '$(2)'
endef
