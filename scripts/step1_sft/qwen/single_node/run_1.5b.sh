#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Qwen2.5-1.5B, on all GPUs of one machine.
# Usage: run_1.5b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/qwen2.5-1.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
