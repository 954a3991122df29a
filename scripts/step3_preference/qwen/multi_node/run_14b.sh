#!/usr/bin/env bash
# Step 3, DPO of Qwen2.5-14B, on several machines.
# Usage: [METHOD=NAME] [HOSTFILE=FILE] run_14b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/qwen2.5-14b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
