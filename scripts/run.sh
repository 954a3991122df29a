#!/usr/bin/env bash
# Runs one training step for one model.
#
#   bash scripts/run.sh step1_sft opt-1.3b single_gpu out/step1_sft
#   ACTOR=out/step1_sft CRITIC=out/step2_reward bash scripts/run.sh step3_ppo llama-3.1-8b single_node
#
# Usage: run.sh STEP MODEL DEPLOYMENT [OUTPUT] [ZERO_STAGE] [SETTINGS ...]
#   STEP        step0_pretrain, step1_sft, step2_reward, step3_ppo, step3_grpo, step3_preference
#   MODEL       a file in configs/, without .yaml; MODEL_lora adds configs/lora.yaml
#   DEPLOYMENT  single_gpu, single_node, multi_node
#   ZERO_STAGE  0 to 3; default: 0 on one GPU, otherwise that of the model's file
#
# PYTHON         the interpreter; default: the active environment's, then that of `make demo`
# NUM_PROCESSES  processes of single_node; default: one per GPU
# HOSTFILE       machines of multi_node; default: the SLURM allocation
# LAUNCH         more options for multi_node, such as "--include worker-0" (docs/scaling.md)
# CORPUS         for step0_pretrain: token files or texts
# ACTOR, CRITIC  for step 3: the outputs of steps 1 and 2; default: those in output/
# CRITIC_STAGE   ZeRO stage of the critic; default: the actor's
# METHOD         for step3_preference: dpo (default) or another method of docs/preference.md
set -euo pipefail
if [ $# -lt 3 ]; then sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; fi
STEP=$1 MODEL=$2 DEPLOYMENT=$3
METHOD=${METHOD:-dpo} OUTPUT=${4:-} STAGE=${5:-}
shift $(($# < 5 ? $# : 5))
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
source "$ROOT/scripts/python.sh"

case $DEPLOYMENT in
  single_gpu) LAUNCHER=() STAGE=${STAGE:-0} ;;
  single_node)
    LAUNCHER=(-m pipeline.launch.torchrun --standalone --nproc-per-node "${NUM_PROCESSES:-gpu}") ;;
  multi_node)
    read -ra LAUNCH <<<"${LAUNCH:-}"
    LAUNCHER=(-m pipeline.launch.cluster ${HOSTFILE:+--hostfile "$HOSTFILE"}
      ${LAUNCH[@]+"${LAUNCH[@]}"}) ;;
  *) echo "error: DEPLOYMENT is $DEPLOYMENT; choose single_gpu, single_node or multi_node" >&2; exit 2 ;;
esac

SETTINGS=(--config "$ROOT/configs/${MODEL%_lora}.yaml")
if [[ $MODEL == *_lora ]]; then SETTINGS+=(--config "$ROOT/configs/lora.yaml"); fi
MODULE=$STEP MODELS=(model)
ACTOR=${ACTOR:-output/step1_sft} CRITIC=${CRITIC:-output/step2_reward}
case $STEP in
  step0_pretrain) SETTINGS+=(--data.path "${CORPUS:-c.tokens}") ;;
  step1_sft | step2_reward) ;;
  step3_ppo)
    SETTINGS+=(--actor.path "$ACTOR" --critic.path "$CRITIC" --reward.path "$CRITIC")
    MODELS=(actor critic) ;;
  step3_grpo)
    SETTINGS+=(--config "$ROOT/configs/gsm8k-grpo.yaml" --actor.path "$ACTOR")
    MODULE=step3_ppo MODELS=(actor) ;;
  step3_preference)
    SETTINGS+=(--method "$METHOD" --model.path "$ACTOR")
    OUTPUT=${OUTPUT:-output/step3_$METHOD} ;;
  *) echo "error: there is no step $STEP; scripts/run.sh lists the steps" >&2; exit 2 ;;
esac
for model in "${MODELS[@]}"; do
  stage=$STAGE
  if [ "$model" = critic ]; then stage=${CRITIC_STAGE:-$STAGE}; fi
  if [ -n "$stage" ]; then SETTINGS+=("--$model.zero_stage" "$stage"); fi
done
SETTINGS+=(--output_dir "${OUTPUT:-output/$MODULE}")

exec "$PYTHON" ${LAUNCHER[@]+"${LAUNCHER[@]}"} -m "$MODULE.train" "${SETTINGS[@]}" "$@"
