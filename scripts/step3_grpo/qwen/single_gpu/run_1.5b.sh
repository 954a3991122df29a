#!/usr/bin/env bash
# Step 3, GRPO of Qwen2.5-1.5B against GSM8K's answers, on one GPU.
# Usage: run_1.5b.sh [ACTOR] [ROWS] [ACTOR_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="grpo/qwen2.5-1.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
