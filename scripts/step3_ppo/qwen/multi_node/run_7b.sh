#!/usr/bin/env bash
# Step 3, PPO of Qwen2.5-7B, on several machines.
# Usage: [HOSTFILE=FILE] run_7b.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/qwen2.5-7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
