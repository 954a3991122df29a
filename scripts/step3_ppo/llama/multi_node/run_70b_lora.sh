#!/usr/bin/env bash
# Step 3, PPO of Llama-3.1-70B with LoRA, on several machines.
# Usage: [HOSTFILE=FILE] run_70b_lora.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/llama-3.1-70b ppo/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
