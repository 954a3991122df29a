#!/usr/bin/env bash
# Step 3, PPO of Llama-3.1-8B, on all GPUs of one machine.
# Usage: run_8b.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
ACTOR=${1:-} CRITIC=${2:-} CRITIC_STAGE=${4:-} \
  exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" \
  step3_ppo llama-3.1-8b single_node "${5:-}" "${3:-}" "${@:6}"
