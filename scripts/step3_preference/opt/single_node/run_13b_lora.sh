#!/usr/bin/env bash
# Step 3, DPO of OPT-13B with LoRA, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_13b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-13b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
