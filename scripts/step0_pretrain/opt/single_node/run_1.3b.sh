#!/usr/bin/env bash
# Step 0, continued pre-training of OPT-1.3B, on all GPUs of one machine.
# Usage: run_1.3b.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/opt-1.3b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
