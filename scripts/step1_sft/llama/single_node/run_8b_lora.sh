#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-3.1-8B with LoRA, on all GPUs of one machine.
# Usage: run_8b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/llama-3.1-8b sft/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
