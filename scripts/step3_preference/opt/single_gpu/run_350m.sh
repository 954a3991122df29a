#!/usr/bin/env bash
# Step 3, DPO of OPT-350M, on one GPU.
# Usage: [METHOD=NAME] run_350m.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-350m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
