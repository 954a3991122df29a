#!/usr/bin/env bash
# Step 2, the reward model from Qwen2.5-0.5B, on one GPU. ACTOR is step 1's output.
# Usage: [ACTOR=DIR] run_0.5b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
OUTPUT=${1:-output/step2_reward}
ACTOR=${ACTOR:-$(dirname "$OUTPUT")/step1_sft}

"${PYTHON:-python3}" -m step2_reward.train --config "$ROOT/configs/reward/qwen2.5-0.5b.yaml" \
  --output_dir "$OUTPUT" --model.zero_stage "${2:-0}" --actor.path "$ACTOR" "${@:3}"
