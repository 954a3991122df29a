#!/usr/bin/env bash
# Step 3, DPO of Qwen2.5-1.5B, on one GPU.
# Usage: [METHOD=NAME] run_1.5b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/qwen2.5-1.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
