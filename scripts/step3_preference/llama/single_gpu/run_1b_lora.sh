#!/usr/bin/env bash
# Step 3, DPO of Llama-3.2-1B with LoRA, on one GPU.
# Usage: [METHOD=NAME] run_1b_lora.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/llama-3.2-1b preference/lora" \
  source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
