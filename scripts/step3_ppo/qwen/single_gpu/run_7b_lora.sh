#!/usr/bin/env bash
# Step 3, PPO of Qwen2.5-7B with LoRA, on one GPU.
# Usage: run_7b_lora.sh
#   [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/qwen2.5-7b ppo/lora" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
