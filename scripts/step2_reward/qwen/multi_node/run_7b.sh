#!/usr/bin/env bash
# Step 2, the reward model from Qwen2.5-7B, on several machines.
# Usage: [HOSTFILE=FILE] [ACTOR=DIR] run_7b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/qwen2.5-7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
