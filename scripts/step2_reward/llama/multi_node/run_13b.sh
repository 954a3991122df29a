#!/usr/bin/env bash
# Step 2, the reward model from Llama-2-13B, on several machines.
# Usage: [HOSTFILE=FILE] [ACTOR=DIR] run_13b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/llama-2-13b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
