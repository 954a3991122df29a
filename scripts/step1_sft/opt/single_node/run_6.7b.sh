#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-6.7B, on all GPUs of one machine.
# Usage: run_6.7b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft opt-6.7b single_node "$@"
