#!/usr/bin/env bash
# Step 3, GRPO of Llama-3.1-8B with LoRA against GSM8K's answers, on all GPUs of one machine.
# Usage: run_8b_lora.sh [ACTOR] [ROWS] [ACTOR_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="grpo/llama-3.1-8b grpo/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
