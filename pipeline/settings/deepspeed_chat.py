"""Options of DeepSpeed-Chat's scripts and their counterparts.

The options are those of its steps' `main.py`, including step 2 by DPO. They are refused with a
message that names the counterpart. `docs/deepspeed_chat.md` shows this table: STEP is `sft`,
`reward`, `ppo` or `preference`; MODEL one of their models, such as `sft.model` or `ppo.critic`.
"""

_EOT = "--format or --STEP.data.format, whose template ends each turn with a token"
_PTX = "--ppo.ptx_data, a file or a dataset on the Hub"
_ROLLOUT = "--ppo.rollout_size, the number of responses over all batches and processes"
_DROPOUT = "not needed: dropout is off in every model"

COUNTERPARTS = {
    "model_name_or_path": "--actor-model or --reward-model",
    "actor_model_name_or_path": "--ppo.actor.path, by default step 1's output",
    "critic_model_name_or_path": "--ppo.reward.path and --ppo.critic.path, by default step 2's"
    " output",
    "sft_only_data_path": "--sft.data.path, the only data of step 1",
    "data_output_path": "not needed: no row index is written",
    "unsupervised_dataset_name": _PTX,
    "unsupervised_dataset_config_name": _PTX,
    "unsup_coef": "--ppo.ptx_coef, the weight of the mean loss per token",
    "preprocessing_num_workers": "not needed: rows are tokenized during training",
    "max_seq_len": "--max-length or --STEP.data.max_length",
    "max_prompt_seq_len": "--ppo.max_prompt_length",
    "max_answer_seq_len": "--ppo.max_new_tokens",
    "num_padding_at_beginning": "not needed: padding is masked by sequence length",
    "add_eot_token": _EOT,
    "eot_token": _EOT,
    "per_device_train_batch_size": "--sft.micro_batch_size, --reward.micro_batch_size or"
    " --preference.micro_batch_size",
    "per_device_eval_batch_size": "not needed: evaluation uses micro_batch_size",
    "per_device_training_batch_size": "--ppo.micro_batch_size",
    "per_device_generation_batch_size": _ROLLOUT,
    "generation_batches": _ROLLOUT,
    "gradient_accumulation_steps": "--batch-size or --STEP.batch_size, the global batch"
    " size: rows per optimizer step over all processes and micro-batches",
    "num_train_epochs": "--epochs or --STEP.epochs",
    "ppo_epochs": "--ppo.ppo_epochs",
    "eval_interval": "--STEP.eval_every",
    "eval_iters": "--STEP.data.max_eval_rows, a number of rows",
    "enable_test_mode": "--STEP.max_steps",
    "test_stop_step": "--STEP.max_steps",
    "learning_rate": "--lr or --MODEL.optim.lr",
    "actor_learning_rate": "--ppo.actor.optim.lr",
    "critic_learning_rate": "--ppo.critic.optim.lr",
    "weight_decay": "--MODEL.optim.weight_decay",
    "actor_weight_decay": "--ppo.actor.optim.weight_decay",
    "critic_weight_decay": "--ppo.critic.optim.weight_decay",
    "lr_scheduler_type": "--MODEL.optim.schedule",
    "num_warmup_steps": "--MODEL.optim.warmup_steps",
    "beta": "--preference.beta",
    "label_smoothing": "--preference.label_smoothing",
    "enable_ema": "--ppo.ema_decay 0.992",
    "lora_dim": "--lora or --MODEL.lora.rank",
    "actor_lora_dim": "--ppo.actor.lora.rank",
    "critic_lora_dim": "--ppo.critic.lora.rank",
    "lora_module_name": "--MODEL.lora.targets, module names as in peft",
    "actor_lora_module_name": "--ppo.actor.lora.targets",
    "critic_lora_module_name": "--ppo.critic.lora.targets",
    "lora_learning_rate": "--MODEL.lora.lr",
    "actor_lora_learning_rate": "--ppo.actor.lora.lr",
    "critic_lora_learning_rate": "--ppo.critic.lora.lr",
    "only_optimize_lora": "not needed: with --lora only adapters are trained",
    "enable_mixed_precision_lora": "--quantize int8 or --MODEL.quantize int8",
    **dict.fromkeys(("dropout", "actor_dropout", "critic_dropout"), _DROPOUT),
    **{f"disable_{role}dropout": _DROPOUT for role in ("", "actor_", "critic_")},
    "deepspeed": "not needed: this project always uses its own engine",
    "deepspeed_config": "--zero-config, which reads a DeepSpeed configuration file",
    "local_rank": "not needed: torchrun sets the rank of each process",
    "zero_stage": "--actor-zero-stage, --reward-zero-stage or --MODEL.zero_stage",
    "critic_zero_stage": "--reward-zero-stage or --ppo.critic.zero_stage",
    "offload": "--MODEL.zero.offload.optimizer cpu",
    "offload_reference_model": "--ppo.actor.zero.offload.params cpu, at stage 3, for both actor"
    " and reference",
    "offload_reward_model": "--ppo.critic.zero.offload.params cpu, at stage 3, for both models",
    "dtype": "--MODEL.precision",
    "compute_fp32_loss": "not needed: losses are always computed in fp32",
    "gradient_checkpointing": "--MODEL.gradient_checkpointing",
    "actor_gradient_checkpointing": "--ppo.actor.gradient_checkpointing",
    "critic_gradient_checkpointing": "--ppo.critic.gradient_checkpointing",
    "align_overflow": "not needed: each model skips updates with non-finite gradients on its own",
    "enable_hybrid_engine": "not needed: step 3 always generates with the hybrid engine",
    "unpin_actor_parameters": "--ppo.replica release, the default",
    "release_inference_cache": "not needed: the cache is released after each rollout",
    "tp_gather_partition_size": "not needed: weights are gathered block by block",
    "inference_tp_size": "--ppo.inference_tp_size",
    "print_loss": "not needed: the loss is logged and written to metrics.jsonl",
    "print_answers": "not needed: samples are printed every ppo.samples_every iterations",
    "print_answers_interval": "--ppo.samples_every",
    "enable_tensorboard": "--STEP.trackers tensorboard",
    "tensorboard_path": "not needed: event files are in the step's output directory",
}
"""Our options by DeepSpeed-Chat's name, except those with the same name."""


def deepspeed_chat_hint(name: str) -> str | None:
    """The end of a message on an option of DeepSpeed-Chat; None if it has no such option."""
    here = COUNTERPARTS.get(name.replace("-", "_"), "")
    relation = "is" if here.startswith("not needed") else "corresponds to"
    return f"DeepSpeed-Chat's option {relation} {here}" if here else None
