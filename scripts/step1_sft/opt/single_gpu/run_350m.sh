#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-350M, on one GPU.
# Usage: run_350m.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/opt-350m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
