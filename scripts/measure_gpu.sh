#!/usr/bin/env bash
# Check correctness (first, 285 s) and measure speed (speed, 405 s) on one GPU, offline.
#
#   measure_gpu.sh prepare                           beforehand, with network access
#   measure_gpu.sh first | speed [PART ...]          all parts, or the given ones
#   measure_gpu.sh first | speed --tiny [PART ...]   tiny sizes on the CPU; skips parts that need a GPU
#   measure_gpu.sh first | speed --list              only list the commands
#
# Each part runs in a separate process with its own time limit; a failure does not stop the others.
# Results are written as JSON lines to OUT/rows.jsonl (OUT is output/gpu by default), the output of
# part X to OUT/X.log. A table is printed at the end. Exit code 1 means that a result is not ok.
#
# `prepare` fills .offline, which git ignores, with the wheels for Python 3.12 that the GPU image
# lacks, and with CUDA kernels compiled for sm_90 by NVRTC 13.0 (override with SM=80, NVRTC=12.9.*).
# Copy .offline along with the checkout: `first` and `speed` install the wheels and use the kernels.
#
# PYTHON: the interpreter; defaults to the active environment's, then to that of `make demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
source scripts/python.sh

# Dependencies that an image with torch, transformers, peft, cuda-bindings and pytest lacks, in the
# versions of requirements.lock. `datasets` is not included: only data sets from the Hub need it.
WHEELS="docstring_parser pydantic pydantic_core annotated-types typing-inspection beartype"
MAX_JOBS=3 # parts of `first` that run concurrently

# NAME, time limit in seconds, requirement (-, gpu, or a program), alone or shared, command
list_parts_first() {
  local tests="-m pytest -q -p no:cacheprovider -W default --timeout 90 tests"
  local kernels=$tests/pipeline/kernels/test_device.py nccl=test_graph_contains_nccl_collectives
  local graphs="$tests/inference/engine/test_decoder.py tests/pipeline/system/test_torch_process.py -m gpu"
  cat <<END
card 40 - alone -m benchmarks.device
kernels 120 gpu shared $kernels -k GRID
sizes 60 gpu shared $kernels -k "not GRID"
ppo 100 - shared -m benchmarks.ppo_cases_gpu
train 120 - shared train.py --overwrite --output-dir $OUT/run --sft.max_steps 2 --reward.max_steps 2 --ppo.max_steps 1
stages 90 - shared $tests/pipeline/engine/test_device.py
graphs 60 gpu shared $graphs -k "not $nccl"
memcheck 100 compute-sanitizer shared $kernels -k QUICK
nccl 40 gpu alone $graphs -k $nccl
END
}

list_parts_speed() {
  local tiny=${TINY:+--tiny}
  cat <<END
ppo 150 - alone -m benchmarks.ppo_gpu $tiny
kernels 80 - alone -m benchmarks.kernels_gpu $tiny
engine 80 - alone -m benchmarks.engine_gpu $tiny
generation 80 - alone -m benchmarks.generation --opt $tiny
grpo 90 - alone -m benchmarks.ppo_gpu --model qwen2.5-1.5b --method grpo_2024 --iterations 1 $tiny
END
}

add_row() { printf '{"part": "process", "name": "%s", "ok": %s, %s}\n' "$@" >>"$ROWS"; }

run_part() { # NAME SECONDS NEEDS ALONE COMMAND
  local name=$1 limit=$2 needs=$3 command=$5 start=$SECONDS code=0 left ok=true tests prefix=
  case $needs in
    -) ;;
    gpu) if [ -n "$TINY" ]; then add_row "$name" true '"skipped": "needs a GPU"'; return; fi ;;
    *) prefix="env PYTORCH_NO_CUDA_MEMORY_CACHING=1 $needs --tool memcheck --error-exitcode 9 "
      if [ -n "$TINY" ] || ! command -v "$needs" >/dev/null; then
        add_row "$name" true "\"skipped\": \"needs $needs and a GPU\""
        return
      fi ;;
  esac
  left=$((SUITE_SECONDS - SECONDS))
  if [ $left -lt 8 ]; then add_row "$name" false '"ended": "no time was left"'; return; fi
  timeout --kill-after 2 $((limit < left ? limit : left)) \
    bash -c "exec $prefix\"$PYTHON\" $command" >"$OUT/$name.log" 2>&1 </dev/null || code=$?
  # On a GPU, skipped tests count as failures.
  tests=$(grep -oE '[0-9]+ (passed|failed|skipped|deselected|errors?)\b.*' "$OUT/$name.log" | tail -1) || true
  if [ $code -ne 0 ] || { [ -z "$TINY" ] && [[ $tests == *skipped* ]]; }; then ok=false; fi
  if [ $code -eq 124 ] || [ $code -eq 137 ]; then code='"limit"'; fi
  add_row "$name" $ok "\"ended\": $code, \"seconds\": $((SECONDS - start)), \"tests\": \"${tests//[\"=]/}\""
  if [ $ok = false ]; then tail -n 12 "$OUT/$name.log" | cut -c1-200 | sed "s/^/$name: /"; fi
}

run_suite() { # the parts on standard input
  local name limit needs alone command
  SECONDS=0
  while read -r name limit needs alone command; do
    if [ "$alone" = alone ]; then wait; fi
    while [ "$(jobs -rp | wc -l)" -ge "$MAX_JOBS" ]; do wait -n || true; done
    run_part "$name" "$limit" "$needs" "$alone" "$command" &
    if [ "$alone" = alone ]; then wait; fi
  done
  wait
  "$PYTHON" -m benchmarks.device --show "$ROWS"
}

prepare() {
  local name version platforms=()
  for version in 2_28 2_27 2_17 2014 1; do platforms+=(--platform "manylinux${version}_x86_64"); done
  mkdir -p .offline/kernels
  chmod 700 .offline/kernels
  rm -rf .offline/wheels # two versions of a package would break the installation
  for name in $WHEELS; do
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
      --implementation cp "${platforms[@]}" --dest .offline/wheels \
      "$(grep -i "^$name==" requirements.lock)"
  done
  "$PYTHON" -m pip install --quiet --no-deps --upgrade --target .offline/compiler \
    "nvidia-cuda-nvrtc==${NVRTC:-13.0.*}" "cuda-bindings==${NVRTC:-13.0.*}" cuda-pathfinder
  LD_LIBRARY_PATH=$(echo "$ROOT"/.offline/compiler/nvidia/*/lib) \
    PYTHONPATH=$ROOT/.offline/compiler:$ROOT RLHF_PIPELINE_CACHE=$ROOT/.offline/kernels \
    "$PYTHON" - "${SM:-90}" <<'END'
import sys
from importlib import import_module

from pipeline.kernels.gpu import Gpu

gpu = object.__new__(Gpu)  # stands in for the GPU that this machine lacks
gpu.capability = int(sys.argv[1])
for name in ("adamw", "cache_append", "decode_attention", "sampling"):
    for defines in import_module(f"tests.pipeline.kernels.{name}.cases").SPECIALIZATIONS:
        gpu._get_cubin(name, defines)
END
  rm -rf .offline/compiler
  du -sh .offline/*
}

install_prepared() {
  local site cache=${RLHF_PIPELINE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rlhf-pipeline/kernels}
  if ! "$PYTHON" -c 'import beartype, docstring_parser, pydantic' 2>/dev/null; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" \
      .offline/wheels/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  fi
  mkdir -p "$cache"
  chmod 700 "$cache"
  find .offline/kernels -name '*.cubin' -exec install -m 600 -t "$cache" {} +
}

SUITE=${1:-} TINY= LIST= CHOSEN=
for word in "${@:2}"; do
  case $word in --tiny) TINY=1 ;; --list) LIST=1 ;; *) CHOSEN+=" $word" ;; esac
done
export OUT=${OUT:-output/gpu} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
case $SUITE in
  first) SUITE_SECONDS=285 ;;
  speed) SUITE_SECONDS=405 ;;
  prepare) prepare; exit ;;
  *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
parts=$("list_parts_$SUITE")
for name in $CHOSEN; do
  if ! grep -q "^$name " <<<"$parts"; then echo "error: $SUITE has no part $name" >&2; exit 2; fi
done
if [ -n "$CHOSEN" ]; then parts=$(grep -E "^(${CHOSEN// /|}) " <<<"$parts"); fi
if [ -n "$LIST" ]; then echo "$parts"; exit; fi
mkdir -p "$OUT"
export ROWS=$OUT/rows.jsonl
: >"$ROWS"
if [ -n "$TINY" ]; then
  export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
  MAX_JOBS=1
else
  export RLHF_PIPELINE_KERNELS=${RLHF_PIPELINE_KERNELS:-required}
fi
if [ -d .offline ]; then install_prepared; fi
run_suite <<<"$parts"
