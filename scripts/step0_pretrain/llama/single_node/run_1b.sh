#!/usr/bin/env bash
# Step 0, continued pre-training of Llama-3.2-1B, on all GPUs of one machine.
# Usage: run_1b.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/llama-3.2-1b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
