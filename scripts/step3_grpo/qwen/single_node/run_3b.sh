#!/usr/bin/env bash
# Step 3, GRPO of Qwen2.5-3B against GSM8K's answers, on all GPUs of one machine.
# Usage: run_3b.sh [ACTOR] [ROWS] [ACTOR_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="grpo/qwen2.5-3b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
