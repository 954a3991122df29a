#!/usr/bin/env bash
# Step 0, continued pre-training of OPT-6.7B, on several machines.
# Usage: [HOSTFILE=FILE] run_6.7b.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/opt-6.7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
