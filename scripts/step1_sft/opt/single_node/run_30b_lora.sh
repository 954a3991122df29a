#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-30B with LoRA, on all GPUs of one machine.
# Usage: run_30b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft opt-30b_lora single_node "$@"
