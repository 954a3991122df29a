#!/usr/bin/env bash
# On one GPU, without network: everything, in parts of at most nine minutes (under 40 in all) with one page at
# the end; or one of: the engine (overlap, overhead over plain PyTorch; under 20 minutes),
# the CUDA kernels (right, speed against what memory allows; under 10 minutes), or an iteration of PPO
# (OPT-1.3B with a reward model of 350M; under 20 minutes).
# Usage: measure_gpu.sh [engine] [OPTIONS of benchmarks/engine_gpu.py]; --tiny --device cpu needs no GPU.
#        measure_gpu.sh kernels [OPTIONS of benchmarks/kernels_gpu.py].
#        measure_gpu.sh all [OPTIONS of benchmarks/gpu_all.py]; --tiny needs no GPU.
#        measure_gpu.sh ppo [OPTIONS of benchmarks/ppo_gpu.py]; --tiny needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

part=engine
case "${1:-}" in
all | engine | kernels | ppo)
    part=$1
    shift
    ;;
esac
ROOT=$PWD
source scripts/python.sh
case $part in
all) module=gpu_all ;;
*) module=${part}_gpu ;;
esac
"$PYTHON" -m "benchmarks.$module" "$@"
