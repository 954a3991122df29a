#!/usr/bin/env bash
# Step 0, continued pre-training of Qwen2.5-1.5B, on all GPUs of one machine.
# Usage: run_1.5b.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/qwen2.5-1.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
