#!/usr/bin/env bash
# Step 3, DPO of OPT-6.7B, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_6.7b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-6.7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
