#!/usr/bin/env bash
# Step 3, DPO of Llama-3.1-8B, on several machines.
# Usage: [METHOD=NAME] [HOSTFILE=FILE] run_8b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/llama-3.1-8b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
