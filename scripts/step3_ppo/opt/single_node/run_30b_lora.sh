#!/usr/bin/env bash
# Step 3, PPO of OPT-30B with LoRA, on all GPUs of one machine.
# Usage: run_30b_lora.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
ACTOR=${1:-} CRITIC=${2:-} CRITIC_STAGE=${4:-} \
  exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" \
  step3_ppo opt-30b_lora single_node "${5:-}" "${3:-}" "${@:6}"
