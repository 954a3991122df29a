#!/usr/bin/env bash
# Step 3, GRPO of Llama-3.2-1B against GSM8K's answers, on one GPU.
# Usage: run_1b.sh [ACTOR] [ROWS] [ACTOR_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="grpo/llama-3.2-1b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
