#!/usr/bin/env bash
# Step 2, the reward model from OPT-350M, on all GPUs of one machine.
# Usage: [ACTOR=DIR] run_350m.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/opt-350m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
