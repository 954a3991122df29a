#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Qwen2.5-1.5B with LoRA, on one GPU.
# Usage: run_1.5b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/qwen2.5-1.5b sft/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
