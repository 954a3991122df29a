#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Qwen2.5-0.5B, on one GPU.
# Usage: run_0.5b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
OUTPUT=${1:-output/step1_sft}

"${PYTHON:-python3}" -m step1_sft.train --config "$ROOT/configs/sft/qwen2.5-0.5b.yaml" \
  --output_dir "$OUTPUT" --model.zero_stage "${2:-0}" "${@:3}"
