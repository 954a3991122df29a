#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-13B, on all GPUs of one machine.
# Usage: run_13b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/opt-13b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
