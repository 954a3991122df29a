#!/usr/bin/env bash
# Step 2, the reward model from Llama-2-7B, on all GPUs of one machine.
# Usage: [ACTOR=DIR] run_7b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/llama-2-7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
