#!/usr/bin/env bash
# Step 2, the reward model from OPT-6.7B with LoRA, on one GPU.
# Usage: [ACTOR=DIR] run_6.7b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/opt-6.7b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
