#!/usr/bin/env bash
# Step 2, the reward model from Llama-3.1-70B with LoRA, on several machines.
# Usage: [HOSTFILE=FILE] [ACTOR=DIR] run_70b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="reward/llama-3.1-70b reward/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
