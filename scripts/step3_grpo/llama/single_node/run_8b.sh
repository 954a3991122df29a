#!/usr/bin/env bash
# Step 3, GRPO of Llama-3.1-8B against GSM8K's answers, on all GPUs of one machine.
# Usage: run_8b.sh [ACTOR] [ROWS] [ACTOR_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="grpo/llama-3.1-8b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
