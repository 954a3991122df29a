#!/usr/bin/env bash
# Step 1, supervised fine-tuning of mGPT in Japanese, on one GPU.
# Usage: run_japanese.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft japanese single_gpu "$@"
