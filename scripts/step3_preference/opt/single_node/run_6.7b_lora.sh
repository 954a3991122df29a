#!/usr/bin/env bash
# Step 3, DPO of OPT-6.7B with LoRA, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_6.7b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-6.7b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
