#!/usr/bin/env bash
# Step 3, PPO of OPT-30B, on several machines.
# Usage: [HOSTFILE=FILE] run_30b.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/opt-30b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
