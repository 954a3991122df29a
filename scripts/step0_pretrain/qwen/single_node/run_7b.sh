#!/usr/bin/env bash
# Step 0, continued pre-training of Qwen2.5-7B, on all GPUs of one machine.
# Usage: run_7b.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/qwen2.5-7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
