#!/usr/bin/env bash
# Step 3, PPO of Llama-2-7B with LoRA, on all GPUs of one machine.
# Usage: run_7b_lora.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/llama-2-7b ppo/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
