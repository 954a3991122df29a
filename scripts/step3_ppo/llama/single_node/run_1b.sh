#!/usr/bin/env bash
# Step 3, PPO of Llama-3.2-1B, on all GPUs of one machine.
# Usage: run_1b.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/llama-3.2-1b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
