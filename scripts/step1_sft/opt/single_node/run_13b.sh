#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-13B, on all GPUs of one machine.
# Usage: run_13b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft opt-13b single_node "$@"
