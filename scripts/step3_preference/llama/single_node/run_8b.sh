#!/usr/bin/env bash
# Step 3, DPO of Llama-3.1-8B, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_8b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/llama-3.1-8b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
