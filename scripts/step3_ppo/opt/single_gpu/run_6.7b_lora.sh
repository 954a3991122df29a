#!/usr/bin/env bash
# Step 3, PPO of OPT-6.7B with LoRA, on one GPU.
# Usage: run_6.7b_lora.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
ACTOR=${1:-} CRITIC=${2:-} CRITIC_STAGE=${4:-} \
  exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" \
  step3_ppo opt-6.7b_lora single_gpu "${5:-}" "${3:-}" "${@:6}"
