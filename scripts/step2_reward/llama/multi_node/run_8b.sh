#!/usr/bin/env bash
# Step 2, the reward model from Llama-3.1-8B, on several machines.
# Usage: [HOSTFILE=FILE] [ACTOR=DIR] run_8b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/llama-3.1-8b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
