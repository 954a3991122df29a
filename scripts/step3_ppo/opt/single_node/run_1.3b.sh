#!/usr/bin/env bash
# Step 3, PPO of OPT-1.3B, on all GPUs of one machine. ACTOR and CRITIC are steps 1 and 2's outputs.
# Usage: run_1.3b.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
ACTOR=${1:-output/step1_sft}
CRITIC=${2:-output/step2_reward}

torchrun --standalone --nproc_per_node "${NUM_PROCESSES:-gpu}" \
  -m step3_ppo.train --config "$ROOT/configs/ppo/opt-1.3b.yaml" \
  --actor.path "$ACTOR" --actor.zero_stage "${3:-0}" \
  --critic.path "$CRITIC" --critic.zero_stage "${4:-0}" --reward.path "$CRITIC" \
  --output_dir "${5:-output/step3_ppo}" "${@:6}"
