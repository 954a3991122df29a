#!/usr/bin/env bash
# Step 2, the reward model from OPT-125M, on one GPU.
# Usage: [ACTOR=DIR] run_125m.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/opt-125m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
