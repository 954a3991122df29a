#!/usr/bin/env bash
# Step 3, PPO of OPT-1.3B with LoRA, on one GPU.
# Usage: run_1.3b_lora.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/opt-1.3b ppo/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
