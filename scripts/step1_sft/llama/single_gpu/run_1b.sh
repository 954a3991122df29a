#!/usr/bin/env bash
# Step 1, supervised fine-tuning of Llama-3.2-1B, on one GPU.
# Usage: run_1b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
OUTPUT=${1:-output/step1_sft}

"${PYTHON:-python3}" -m step1_sft.train --config "$ROOT/configs/sft/llama-3.2-1b.yaml" \
  --output_dir "$OUTPUT" --model.zero_stage "${2:-0}" "${@:3}"
