#!/usr/bin/env bash
# Step 0, continued pre-training of Qwen2.5-7B with LoRA, on one GPU.
# Usage: run_7b_lora.sh CORPUS [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
PRESETS="pretrain/qwen2.5-7b pretrain/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
