#!/usr/bin/env bash
# Step 3, PPO of Qwen2.5-0.5B, on one GPU.
# Usage: run_0.5b.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
PRESETS="ppo/qwen2.5-0.5b" source "$(dirname "${BASH_SOURCE[0]}")/../../../run_step.sh"
