#!/usr/bin/env bash
# Step 2, the reward model from Llama-2-7B with LoRA, on all GPUs of one machine.
# Usage: [ACTOR=DIR] run_7b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/llama-2-7b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
