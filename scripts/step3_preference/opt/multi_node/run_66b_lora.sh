#!/usr/bin/env bash
# Step 3, DPO of OPT-66B with LoRA, on several machines.
# Usage: [METHOD=NAME] [HOSTFILE=FILE] run_66b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-66b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
