#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-2-7B, on all GPUs of one machine.
# Usage: run_7b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft llama-2-7b single_node "$@"
