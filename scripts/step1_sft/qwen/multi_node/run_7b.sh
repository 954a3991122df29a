#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Qwen2.5-7B, on several machines.
# Usage: [HOSTFILE=FILE] run_7b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/qwen2.5-7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
