#!/usr/bin/env bash
# Step 3, DPO of OPT-125M, on one GPU.
# Usage: [METHOD=NAME] run_125m.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-125m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
