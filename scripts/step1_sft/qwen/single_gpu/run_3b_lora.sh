#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Qwen2.5-3B with LoRA, on one GPU.
# Usage: run_3b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/qwen2.5-3b sft/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
