#!/usr/bin/env bash
# Step 2, the reward model from OPT-1.3B, on several machines.
# Usage: [HOSTFILE=FILE] [ACTOR=DIR] run_1.3b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/opt-1.3b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
