#!/usr/bin/env bash
# Step 3, GRPO of Qwen2.5-7B with LoRA against GSM8K's answers, on one GPU.
# Usage: run_7b_lora.sh [ACTOR] [ROWS] [ACTOR_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="grpo/qwen2.5-7b grpo/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
