#!/usr/bin/env bash
# Step 0, continued pre-training of Qwen2.5-0.5B, on one GPU.
# Usage: run_0.5b.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/qwen2.5-0.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
