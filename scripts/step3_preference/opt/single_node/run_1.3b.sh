#!/usr/bin/env bash
# Step 3, DPO of OPT-1.3B, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_1.3b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-1.3b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
