#!/usr/bin/env bash
# Step 1, supervised fine-tuning of BLOOM-1.1B in Chinese, on one GPU.
# Usage: run_chinese.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/chinese" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
