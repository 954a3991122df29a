#!/usr/bin/env bash
# Step 2, the reward model from Qwen2.5-1.5B, on all GPUs of one machine.
# Usage: [ACTOR=DIR] run_1.5b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/qwen2.5-1.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
