#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-2-13B, on several machines.
# Usage: [HOSTFILE=FILE] run_13b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/llama-2-13b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
