#!/usr/bin/env bash
# Step 3, PPO of OPT-350M, on one GPU. ACTOR and CRITIC are steps 1 and 2's outputs.
# Usage: run_350m.sh [ACTOR] [CRITIC] [ACTOR_ZERO_STAGE] [CRITIC_ZERO_STAGE] [OUTPUT] [SETTINGS ...]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
ACTOR=${1:-output/step1_sft}
CRITIC=${2:-output/step2_reward}

"${PYTHON:-python3}" -m step3_ppo.train --config "$ROOT/configs/ppo/opt-350m.yaml" \
  --actor.path "$ACTOR" --actor.zero_stage "${3:-0}" \
  --critic.path "$CRITIC" --critic.zero_stage "${4:-0}" --reward.path "$CRITIC" \
  --output_dir "${5:-output/step3_ppo}" "${@:6}"
