#!/usr/bin/env bash
# Step 2, the reward model from Qwen2.5-32B with LoRA, on all GPUs of one machine.
# Usage: [ACTOR=DIR] run_32b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/qwen2.5-32b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
