#!/usr/bin/env bash
# The engine on one GPU: tests, overlap, overhead over plain PyTorch. Under 20 minutes, no network.
# Usage: measure_gpu.sh [OPTIONS of benchmarks/engine_gpu.py]; --tiny --device cpu needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"${PYTHON:-python3}" -m benchmarks.engine_gpu "$@"
