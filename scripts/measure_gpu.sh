#!/usr/bin/env bash
# On one GPU, without network: the engine (tests, overlap, overhead over plain PyTorch; under 20 minutes),
# the CUDA kernels (right, speed against what memory allows; under 10 minutes), or an iteration of PPO
# (OPT-1.3B with a reward model of 350M; under 20 minutes).
# Usage: measure_gpu.sh [engine] [OPTIONS of benchmarks/engine_gpu.py]; --tiny --device cpu needs no GPU.
#        measure_gpu.sh kernels [OPTIONS of benchmarks/kernels_gpu.py]; --backend emulator needs no GPU.
#        measure_gpu.sh ppo [OPTIONS of benchmarks/ppo_gpu.py]; --tiny needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

part=engine
if [[ "${1:-}" == engine || "${1:-}" == kernels || "${1:-}" == ppo ]]; then
    part=$1
    shift
fi
ROOT=$PWD
source scripts/python.sh
"$PYTHON" -m "benchmarks.${part}_gpu" "$@"
