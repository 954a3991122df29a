#!/usr/bin/env bash
# Step 0, continued pre-training of Llama-3.1-8B with LoRA, on one GPU.
# Usage: run_8b_lora.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/llama-3.1-8b pretrain/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
