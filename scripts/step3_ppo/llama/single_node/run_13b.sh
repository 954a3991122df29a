#!/usr/bin/env bash
# Step 3, PPO of Llama-2-13B, on all GPUs of one machine.
# Usage: run_13b.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/llama-2-13b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
