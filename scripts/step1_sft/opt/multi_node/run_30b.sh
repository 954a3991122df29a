#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-30B, on several machines.
# Usage: [HOSTFILE=FILE] run_30b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/opt-30b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
