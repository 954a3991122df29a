#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-125M, on one GPU.
# Usage: run_125m.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/opt-125m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
