#!/usr/bin/env bash
# Step 3, PPO of OPT-1.3B, on one GPU.
# Usage: run_1.3b.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
ACTOR=${1:-} CRITIC=${2:-} CRITIC_STAGE=${4:-} \
  exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" \
  step3_ppo opt-1.3b single_gpu "${5:-}" "${3:-}" "${@:6}"
