#!/usr/bin/env bash
# Step 2, the reward model from Llama-3.2-1B with LoRA, on one GPU.
# Usage: [ACTOR=DIR] run_1b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/llama-3.2-1b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
