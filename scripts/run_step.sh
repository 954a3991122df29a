# What the scripts of the steps have in common. A script sets PRESETS, files below configs/ without
# their ending, and reads this; its directories say which step it is, and where that runs.
#
# PYTHON         the interpreter; without it the active environment's, else that of `make demo`
# NUM_PROCESSES  processes of single_node (one per GPU)
# HOSTFILE       machines of multi_node; without it those of the SLURM allocation
# METHOD         of step3_preference: dpo without it, or another of docs/preference.md
# LAUNCH         further options of multi_node, such as "--include worker-0" (docs/scaling.md)
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
source "$ROOT/scripts/python.sh"
STEP=$(basename "$(dirname "$(dirname "$HERE")")")

case $(basename "$HERE") in
  single_gpu) LAUNCHER=() STAGE=0 ;;
  single_node)
    LAUNCHER=(-m pipeline.launch.torchrun --standalone --nproc-per-node "${NUM_PROCESSES:-gpu}") ;;
  multi_node)
    read -ra LAUNCH <<<"${LAUNCH:-}"
    LAUNCHER=(-m pipeline.launch.cluster ${HOSTFILE:+--hostfile "$HOSTFILE"}
      ${LAUNCH[@]+"${LAUNCH[@]}"}) ;;
esac

SETTINGS=()
for preset in $PRESETS; do
  SETTINGS+=(--config "$ROOT/configs/$preset.yaml")
done
# The stage that is given, else 0 on one GPU, else the preset's.
stage() {
  if [ -n "${2:-${STAGE:-}}" ]; then SETTINGS+=("--$1.zero_stage" "${2:-$STAGE}"); fi
}
MODULE=$STEP
if [ "$STEP" = step0_pretrain ]; then
  SETTINGS+=(--data.path "${1:-c.tokens}")
  stage model "${3:-}"
  SETTINGS+=(--output_dir "${2:-output/$STEP}")
  OWN=3
elif [ "$STEP" = step3_grpo ]; then
  MODULE=step3_ppo
  SETTINGS+=(--actor.path "${1:-output/step1_sft}" --data.path "${2:-gsm8k.jsonl}")
  stage actor "${3:-}"
  SETTINGS+=(--output_dir "${4:-output/step3_ppo}")
  OWN=4
elif [ "$STEP" = step3_preference ]; then
  METHOD=${METHOD:-dpo}
  SETTINGS+=(--method "$METHOD" --model.path "${1:-output/step1_sft}")
  stage model "${2:-}"
  SETTINGS+=(--output_dir "${3:-output/step3_$METHOD}")
  OWN=3
elif [ "$STEP" = step3_ppo ]; then
  CRITIC=${2:-output/step2_reward}
  SETTINGS+=(--actor.path "${1:-output/step1_sft}" --critic.path "$CRITIC" --reward.path "$CRITIC")
  stage actor "${3:-}"
  stage critic "${4:-}"
  SETTINGS+=(--output_dir "${5:-output/step3_ppo}")
  OWN=5
else
  OUTPUT=${1:-output/$STEP}
  stage model "${2:-}"
  SETTINGS+=(--output_dir "$OUTPUT")
  if [ "$STEP" = step2_reward ]; then
    SETTINGS+=(--actor.path "${ACTOR:-$(dirname "$OUTPUT")/step1_sft}")
  fi
  OWN=2
fi
shift $(($# < OWN ? $# : OWN))

exec "$PYTHON" ${LAUNCHER[@]+"${LAUNCHER[@]}"} -m "$MODULE.train" "${SETTINGS[@]}" "$@"
