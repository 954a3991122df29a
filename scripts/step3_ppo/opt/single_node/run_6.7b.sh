#!/usr/bin/env bash
# Step 3, PPO of OPT-6.7B, on all GPUs of one machine.
# Usage: run_6.7b.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/opt-6.7b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
