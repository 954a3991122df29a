#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-3.1-70B, on several machines.
# Usage: [HOSTFILE=FILE] run_70b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/llama-3.1-70b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
