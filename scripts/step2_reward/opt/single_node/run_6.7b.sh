#!/usr/bin/env bash
# Step 2, the reward model from OPT-6.7B, on all GPUs of one machine.
# Usage: [ACTOR=DIR] run_6.7b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/opt-6.7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
