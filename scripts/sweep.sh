#!/usr/bin/env bash
# Runs one step with every combination of ZeRO stage, offload and LoRA, each in a subdirectory of
# OUTPUT and with a row in OUTPUT/sweep.tsv. Failed combinations (for example, out of memory)
# also get a row; finished ones are not repeated.
#
#   bash scripts/sweep.sh step1_sft opt-1.3b single_node out --max_steps 20
#
# Usage: sweep.sh STEP MODEL DEPLOYMENT OUTPUT [SETTINGS ...], as for run.sh
#   STAGES="0 1 2 3"  OFFLOAD="none cpu"  LORA="off 64"  restrict the combinations
set -euo pipefail
STEP=$1 MODEL=$2 DEPLOYMENT=$3 OUTPUT=$4
shift 4
mkdir -p "$OUTPUT"
TABLE=$OUTPUT/sweep.tsv
[ -f "$TABLE" ] || printf 'stage\toffload\tlora\texit\tseconds\n' >"$TABLE"
case $STEP in
  step3_ppo) models=(actor critic) ;;
  step3_grpo) models=(actor) ;;
  *) models=(model) ;;
esac

for stage in ${STAGES:-0 1 2 3}; do
  for offload in ${OFFLOAD:-none cpu}; do
    for lora in ${LORA:-off 64}; do
      if grep -q "^$stage"$'\t'"$offload"$'\t'"$lora"$'\t0\t' "$TABLE"; then continue; fi
      run=$OUTPUT/stage${stage}_${offload}_lora_$lora
      settings=()
      for model in "${models[@]}"; do
        [ "$offload" = none ] || settings+=("--$model.zero.offload.optimizer" "$offload")
        [ "$lora" = off ] || settings+=("--$model.lora.rank" "$lora")
      done
      [ ! -f "$run/config.yaml" ] || rm -rf "$run"  # left by a failed combination
      start=$SECONDS code=0
      bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$STEP" "$MODEL" "$DEPLOYMENT" "$run" "$stage" \
        ${settings[@]+"${settings[@]}"} "$@" || code=$?
      printf '%s\t%s\t%s\t%s\t%s\n' "$stage" "$offload" "$lora" "$code" $((SECONDS - start)) \
        >>"$TABLE"
      [ "$code" -ne 130 ] || exit 130
    done
  done
done
