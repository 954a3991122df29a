#!/usr/bin/env bash
# Step 3, DPO of OPT-1.3B with LoRA, on one GPU.
# Usage: [METHOD=NAME] run_1.3b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-1.3b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
