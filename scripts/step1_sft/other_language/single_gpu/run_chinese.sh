#!/usr/bin/env bash
# Step 1, supervised fine-tuning of BLOOM-1.1B in Chinese, on one GPU.
# Usage: run_chinese.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft chinese single_gpu "$@"
