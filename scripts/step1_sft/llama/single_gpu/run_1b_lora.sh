#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-3.2-1B with LoRA, on one GPU.
# Usage: run_1b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/llama-3.2-1b sft/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
