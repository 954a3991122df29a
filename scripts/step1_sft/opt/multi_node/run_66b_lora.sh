#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-66B with LoRA, on several machines.
# Usage: [HOSTFILE=FILE] run_66b_lora.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="sft/opt-66b sft/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
