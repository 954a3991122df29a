#!/usr/bin/env bash
# Step 3, PPO of OPT-13B, on all GPUs of one machine.
# Usage: run_13b.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/opt-13b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
