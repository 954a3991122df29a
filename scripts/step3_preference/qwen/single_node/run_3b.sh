#!/usr/bin/env bash
# Step 3, DPO of Qwen2.5-3B, on all GPUs of one machine.
# Usage: [METHOD=NAME] run_3b.sh [ACTOR] [ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="preference/qwen2.5-3b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
