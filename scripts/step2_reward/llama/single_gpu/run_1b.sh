#!/usr/bin/env bash
# Step 2, the reward model from Llama-3.2-1B, on one GPU. ACTOR is step 1's output.
# Usage: [ACTOR=DIR] run_1b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
OUTPUT=${1:-output/step2_reward}
ACTOR=${ACTOR:-$(dirname "$OUTPUT")/step1_sft}

"${PYTHON:-python3}" -m step2_reward.train --config "$ROOT/configs/reward/llama-3.2-1b.yaml" \
  --output_dir "$OUTPUT" --model.zero_stage "${2:-0}" --actor.path "$ACTOR" "${@:3}"
