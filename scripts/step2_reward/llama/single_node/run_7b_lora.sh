#!/usr/bin/env bash
# Step 2, training of a reward model from Llama-2-7B with LoRA, on all GPUs of one machine.
# Usage: run_7b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step2_reward llama-2-7b_lora single_node "$@"
