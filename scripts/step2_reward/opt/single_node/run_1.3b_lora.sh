#!/usr/bin/env bash
# Step 2, the reward model from OPT-1.3B with LoRA, on all GPUs of one machine.
# Usage: [ACTOR=DIR] run_1.3b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/opt-1.3b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
