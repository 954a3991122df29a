#!/usr/bin/env bash
# Step 3, PPO of OPT-125M, on one GPU.
# Usage: run_125m.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/opt-125m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
