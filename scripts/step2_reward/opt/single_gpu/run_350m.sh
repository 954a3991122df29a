#!/usr/bin/env bash
# Step 2, training of a reward model from OPT-350M, on one GPU.
# Usage: run_350m.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step2_reward opt-350m single_gpu "$@"
