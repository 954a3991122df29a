# make demo    a fresh environment in .venv, then the three steps on the embedded default
# make test    a fresh environment in .test-venv, then lint, types and tests
# make check   lint, types and tests in the current environment
# make test-jobs     whole commands, and jobs of several processes; CI runs these with `make test`
# make test-faults   slow fault tests: kills at random instants, lost machines, every pair of layouts
# make test-grid     GPU kernels: all cases, injected faults, every architecture; every model family
#                    of transformers; every stage, family and format; ARM kernels if
#                    g++-aarch64-linux-gnu and qemu-user are installed
# make test-serve    the server with hundreds of disconnecting clients, and 20,000 fuzzed requests
#
# PYTHON selects the interpreter: make demo PYTHON=python3.12
# TORCH selects the build of torch, as arguments of pip. The default is your package index's build,
# which on Linux may be the CUDA build of several gigabytes. Without a GPU, use the index of CPU
# builds from PyTorch's installation page:
#   make demo TORCH="torch==2.13.0 --index-url ADDRESS"

PYTHON ?= python3
TORCH ?= torch==2.13.0
OUTPUT ?= output
CI_TIERS = not faults and not grid and not serve
TIERS ?= not jobs and $(CI_TIERS)
# Keep the order of files from tests/conftest.py, instead of largest first.
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

# Always cache bytecode: the tests start hundreds of processes. Pyright runs in parallel with the
# first tests.
check: export PYTHONDONTWRITEBYTECODE =
check:
	ruff check .
	ruff format --check .
	pyright & types=$$!; python -m pytest $(WORKERS) -m "$(TIERS)"; tests=$$?; \
		wait $$types && exit $$tests

# Install torch first and alone, so that no other package selects its build. $(3) are further options of
# pip: the tests compile only the modules that they import, a quarter of all.
define install
	$(PYTHON) -m venv --clear $(1)
	grep -v '^torch==' requirements.lock > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet $(3) --constraint $(1)/constraints.txt $(TORCH)
	$(1)/bin/python -m pip install --quiet $(3) --constraint $(1)/constraints.txt --editable '$(2)'
endef
