#!/usr/bin/env bash
# Step 2, the reward model from Llama-3.1-8B with LoRA, on all GPUs of one machine.
# Usage: [ACTOR=DIR] run_8b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/llama-3.1-8b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
