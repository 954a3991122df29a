#!/usr/bin/env bash
# Step 2, training of a reward model from Llama-3.1-8B, on all GPUs of one machine.
# Usage: run_8b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step2_reward llama-3.1-8b single_node "$@"
