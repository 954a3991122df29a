#!/usr/bin/env bash
# Step 2, the reward model from Qwen2.5-3B with LoRA, on one GPU.
# Usage: [ACTOR=DIR] run_3b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/qwen2.5-3b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
