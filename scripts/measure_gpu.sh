#!/usr/bin/env bash
# On one GPU, without network: the engine's overhead over plain PyTorch, the CUDA kernels, generation, or an
# iteration of PPO (OPT-1.3B with a reward model of 350M), each under 20 minutes; or all of them.
# Usage: measure_gpu.sh [engine | kernels | ppo | generation] [OPTIONS of benchmarks/*_gpu.py, generation.py]
#        measure_gpu.sh all [--tiny]    The output of each part also goes to output/gpu/PART.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

part=engine
case "${1:-}" in
all | engine | kernels | ppo | generation)
    part=$1
    shift
    ;;
esac
ROOT=$PWD
source scripts/python.sh
measure() {
    local module=${1}_gpu
    [ "$1" != generation ] || module=generation
    "$PYTHON" -m "benchmarks.$module" "${@:2}"
}
if [ "$part" != all ]; then
    measure "$part" "$@"
    exit
fi
mkdir -p output/gpu
failed=0
for part in engine kernels ppo generation; do
    measure "$part" "$@" 2>&1 | tee "output/gpu/$part.log" || failed=1
done
exit $failed
