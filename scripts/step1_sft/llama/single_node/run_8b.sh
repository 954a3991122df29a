#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-3.1-8B, on all GPUs of one machine.
# Usage: run_8b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft llama-3.1-8b single_node "$@"
