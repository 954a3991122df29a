#!/usr/bin/env bash
# Step 3, DPO of Llama-3.1-70B with LoRA, on several machines.
# Usage: [METHOD=NAME] [HOSTFILE=FILE] run_70b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/llama-3.1-70b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
