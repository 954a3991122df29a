#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-1.3B with LoRA, on one GPU.
# Usage: run_1.3b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/opt-1.3b sft/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
