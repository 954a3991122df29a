#!/usr/bin/env bash
# Step 3, DPO of OPT-30B with LoRA, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_30b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-30b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
