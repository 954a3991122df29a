#!/usr/bin/env bash
# Step 3, DPO of Llama-2-13B, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_13b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/llama-2-13b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
