#!/usr/bin/env bash
# Step 3, DPO of OPT-350M, on several machines.
# Usage: [METHOD=NAME] [HOSTFILE=FILE] run_350m.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-350m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
