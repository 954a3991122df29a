#!/usr/bin/env bash
# Step 2, the reward model from Llama-3.2-1B, on one GPU.
# Usage: [ACTOR=DIR] run_1b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/llama-3.2-1b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
