#!/usr/bin/env bash
# Step 3, DPO of Qwen2.5-7B with LoRA, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_7b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/qwen2.5-7b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
