#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Qwen2.5-7B with LoRA, on all GPUs of one machine.
# Usage: run_7b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/qwen2.5-7b sft/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
