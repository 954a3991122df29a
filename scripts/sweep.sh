#!/usr/bin/env bash
# One step with every combination of ZeRO stage, offload and LoRA, one after the other; each in a
# directory of its own below OUTPUT, a row each in OUTPUT/sweep.tsv. A combination that fails, as
# when memory runs out, is a row too; one that is finished is not run again.
#
#   bash scripts/sweep.sh scripts/step1_sft/opt/single_node/run_1.3b.sh out --max_steps 20
#
# Usage: sweep.sh SCRIPT OUTPUT [SETTINGS ...]
#   STAGES="0 1 2 3"  OFFLOAD="none cpu"  LORA="off 64"  narrow it down; step 0 takes CORPUS, step
#   3 ACTOR, CRITIC
set -euo pipefail
SCRIPT=$1 OUTPUT=$2
shift 2
mkdir -p "$OUTPUT"
TABLE=$OUTPUT/sweep.tsv
[ -f "$TABLE" ] || printf 'stage\toffload\tlora\texit\tseconds\n' >"$TABLE"

for stage in ${STAGES:-0 1 2 3}; do
  for offload in ${OFFLOAD:-none cpu}; do
    for lora in ${LORA:-off 64}; do
      if grep -q "^$stage"$'\t'"$offload"$'\t'"$lora"$'\t0\t' "$TABLE"; then continue; fi
      run=$OUTPUT/stage${stage}_${offload}_lora_$lora
      models=(model) arguments=("$run" "$stage")
      if [[ $SCRIPT == *step0_pretrain* ]]; then
        arguments=("${CORPUS:-c.tokens}" "$run" "$stage")
      elif [[ $SCRIPT == *step3_ppo* ]]; then
        models=(actor critic)
        arguments=("${ACTOR:-output/step1_sft}" "${CRITIC:-output/step2_reward}" "$stage" "$stage"
          "$run")
      fi
      settings=()
      for model in "${models[@]}"; do
        [ "$offload" = none ] || settings+=("--$model.zero.offload.optimizer" "$offload")
        [ "$lora" = off ] || settings+=("--$model.lora.rank" "$lora")
      done
      [ ! -f "$run/config.yaml" ] || rm -rf "$run"  # of a combination that failed
      began=$SECONDS code=0
      bash "$SCRIPT" "${arguments[@]}" ${settings[@]+"${settings[@]}"} "$@" || code=$?
      printf '%s\t%s\t%s\t%s\t%s\n' "$stage" "$offload" "$lora" "$code" $((SECONDS - began)) \
        >>"$TABLE"
      [ "$code" -ne 130 ] || exit 130
    done
  done
done
