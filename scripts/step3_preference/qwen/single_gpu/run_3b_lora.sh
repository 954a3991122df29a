#!/usr/bin/env bash
# Step 3, DPO of Qwen2.5-3B with LoRA, on one GPU.
# Usage: [METHOD=NAME] run_3b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/qwen2.5-3b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
