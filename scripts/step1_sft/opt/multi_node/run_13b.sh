#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-13B, on several machines.
# Usage: [HOSTFILE=FILE] run_13b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/opt-13b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
