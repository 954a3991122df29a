#!/usr/bin/env bash
# Step 3, PPO of Llama-3.1-8B, on several machines.
# Usage: [HOSTFILE=FILE] run_8b.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/llama-3.1-8b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
