#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-3.2-1B, on all GPUs of one machine.
# Usage: run_1b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/llama-3.2-1b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
