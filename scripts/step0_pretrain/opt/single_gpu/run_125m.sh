#!/usr/bin/env bash
# Step 0, continued pre-training of OPT-125M, on one GPU.
# Usage: run_125m.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/opt-125m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
