#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-3.1-70B with LoRA, on several machines.
# Usage: [HOSTFILE=FILE] run_70b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/llama-3.1-70b sft/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
