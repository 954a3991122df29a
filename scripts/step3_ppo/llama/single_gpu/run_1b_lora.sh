#!/usr/bin/env bash
# Step 3, PPO of Llama-3.2-1B with LoRA, on one GPU.
# Usage: run_1b_lora.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/llama-3.2-1b ppo/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
