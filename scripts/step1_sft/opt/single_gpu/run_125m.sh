#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-125M, on one GPU.
# Usage: run_125m.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
OUTPUT=${1:-output/step1_sft}

"${PYTHON:-python3}" -m step1_sft.train --config "$ROOT/configs/sft/opt-125m.yaml" \
  --output_dir "$OUTPUT" --model.zero_stage "${2:-0}" "${@:3}"
