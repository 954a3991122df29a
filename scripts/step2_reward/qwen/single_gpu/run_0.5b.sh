#!/usr/bin/env bash
# Step 2, the reward model from Qwen2.5-0.5B, on one GPU.
# Usage: [ACTOR=DIR] run_0.5b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/qwen2.5-0.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
