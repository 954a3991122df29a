# make demo    a fresh environment in .venv, then the three steps on the embedded model and task
# make test    a fresh environment in .test-venv, then lint, type checks and tests
# make check   lint, type checks and tests in the current environment
# make test-jobs     whole commands, and jobs of several processes; CI runs these with `make test`
# make test-faults   slow fault tests: kills at random instants, lost machines, every pair of layouts
# make test-grid     GPU kernels: all cases, injected faults, every architecture; every model family
#                    of transformers; every stage, family and format; ARM kernels if
#                    g++-aarch64-linux-gnu and qemu-user are installed
# make recipe NAME=c   a recipe from docs/recipes.md, in the current environment
# make test-serve    the server with hundreds of disconnecting clients, and 20,000 fuzzed requests
#
# PYTHON selects the interpreter: make demo PYTHON=python3.12
# TORCH selects the build of torch, as arguments for pip. The default is your package index's build,
# which on Linux may be the CUDA build of several gigabytes. Without a GPU, use the index of CPU
# builds from PyTorch's installation page:
#   make demo TORCH="torch==2.13.0 --index-url ADDRESS"

PYTHON ?= python3
TORCH ?= torch==2.13.0
OUTPUT ?= output
CI_TIERS = not faults and not grid and not serve
TIERS ?= not jobs and $(CI_TIERS)
# Keep the order of files from tests/conftest.py instead of running the largest files first.
WORKERS = --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo recipe install-test test test-jobs test-faults test-grid test-serve check

demo: export PYTHONDONTWRITEBYTECODE =
demo:
	$(call install,.venv,.[serve])
	.venv/bin/python train.py --output-dir $(OUTPUT) --resume
	@echo "The report is in $(OUTPUT)/report.html"
	@echo "Chat, compare and rate: .venv/bin/python -m inference.serve --run $(OUTPUT)"

# The commands from docs/recipes.md, with the environment's python. ARGS adds training options.
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
DATA ?= data
RUN = $(OUTPUT)/$(NAME)
PAIRS = $(DATA)/harmless-base/test.jsonl.gz
# Skips a command that needs the output of training, which a dry run does not write.
THEN = $(if $(findstring --dry-run,$(ARGS))$(findstring --plan-for,$(ARGS)),@:)
RECIPE = python train.py --config $(wildcard configs/recipes/$(NAME)-*.yaml) --actor-model $(MODEL) \
		--output-dir $(RUN) $(ARGS) --data-path

recipe: recipe-$(NAME)

# The judge is a second reward model, trained on the pairs whose prompts PPO used.
recipe-a:
	mkdir -p $(OUTPUT)
	gzip -dc $(PAIRS) | head -n 256 > $(OUTPUT)/held_out.jsonl
	$(RECIPE) $(PAIRS) --eval-path $(OUTPUT)/held_out.jsonl
	$(THEN) $(RECIPE) $(PAIRS) --eval-path $(OUTPUT)/held_out.jsonl --step 2 --data-split 6,4,0 \
		--reward-model $(RUN)/step1_sft --output-dir $(RUN)-judge
	$(THEN) python -m evaluation.winrate --paths $(RUN)/step1_sft $(RUN)/step3_ppo/actor --limit 128 \
		--prompts $(OUTPUT)/held_out.jsonl --judge '{kind: model, path: $(RUN)-judge/step2_reward}' \
		--max-new-tokens 48 --temperature 0.8 --output $(RUN)-winrate.json

recipe-b:
	$(RECIPE) $(PAIRS)

recipe-c:
	mkdir -p $(OUTPUT)
	python scripts/recipe_rows.py bullets $(DATA) $(OUTPUT)/bullets.jsonl
	$(RECIPE) $(OUTPUT)/bullets.jsonl

recipe-d:
	mkdir -p $(OUTPUT)
	python scripts/recipe_rows.py problems $(DATA) $(OUTPUT)/problems.jsonl
	$(RECIPE) $(OUTPUT)/problems.jsonl

recipe-e:
	$(RECIPE) $(PAIRS)
	$(THEN) python -m pipeline.export --path $(RUN) --to gguf --out $(RUN)-gguf

install-test:
	$(call install,.test-venv,.[dev])

test: install-test
	PATH="$(CURDIR)/.test-venv/bin:$$PATH" $(MAKE) check

test-jobs: export PYTHONDONTWRITEBYTECODE =
test-jobs: install-test
	.test-venv/bin/python -m pytest $(WORKERS) -m "jobs and $(CI_TIERS)"

test-faults: export PYTHONDONTWRITEBYTECODE =
test-faults: install-test
	.test-venv/bin/python -m pytest -m faults

test-grid: export PYTHONDONTWRITEBYTECODE =
test-grid: install-test
	.test-venv/bin/python -m pytest -m grid

test-serve: export PYTHONDONTWRITEBYTECODE =
test-serve: install-test
	.test-venv/bin/python -m pytest -m serve

# Always cache bytecode: the tests start hundreds of processes.
check: export PYTHONDONTWRITEBYTECODE =
check:
	ruff check .
	ruff format --check .
	pyrefly check --min-severity error
	python -m pytest $(WORKERS) -m "$(TIERS)"

# Upgrade pip first: the one that comes with Python 3.11 takes twice as long. Install torch alone, so
# that no other package selects its build. Modules are compiled when they are first imported, which
# three quarters of them never are.
define install
	$(PYTHON) -m venv --clear $(1)
	grep -v '^torch==' requirements.lock > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet --upgrade --constraint $(1)/constraints.txt pip
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(1)/constraints.txt $(TORCH)
	$(1)/bin/python -m pip install --quiet --no-compile --constraint $(1)/constraints.txt --editable '$(2)'
endef
