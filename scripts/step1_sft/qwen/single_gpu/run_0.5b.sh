#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Qwen2.5-0.5B, on one GPU.
# Usage: run_0.5b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/qwen2.5-0.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
