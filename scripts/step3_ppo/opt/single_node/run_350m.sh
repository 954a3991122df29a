#!/usr/bin/env bash
# Step 3, PPO of OPT-350M, on all GPUs of one machine.
# Usage: run_350m.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/opt-350m" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
