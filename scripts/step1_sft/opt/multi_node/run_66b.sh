#!/usr/bin/env bash
# Step 1, supervised fine-tuning of OPT-66B, on several machines.
# Usage: [HOSTFILE=FILE] run_66b.sh [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../../run.sh" step1_sft opt-66b multi_node "$@"
