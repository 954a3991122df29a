#!/usr/bin/env bash
# Step 3, DPO of OPT-13B, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_13b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-13b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
