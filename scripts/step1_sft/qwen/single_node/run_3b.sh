#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Qwen2.5-3B, on all GPUs of one machine.
# Usage: run_3b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/qwen2.5-3b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
