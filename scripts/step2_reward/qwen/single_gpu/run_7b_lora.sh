#!/usr/bin/env bash
# Step 2, the reward model from Qwen2.5-7B with LoRA, on one GPU.
# Usage: [ACTOR=DIR] run_7b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/qwen2.5-7b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
