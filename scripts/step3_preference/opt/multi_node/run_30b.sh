#!/usr/bin/env bash
# Step 3, DPO of OPT-30B, on several machines.
# Usage: [METHOD=NAME] [HOSTFILE=FILE] run_30b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/opt-30b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
