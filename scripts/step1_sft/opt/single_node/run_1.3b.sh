#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-1.3B, on all GPUs of one machine.
# Usage: run_1.3b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft opt-1.3b single_node "$@"
