"""Options of DeepSpeed-Chat's scripts, and what each of them is here.

They are those of its steps' `main.py`, step 2 by DPO included. Settings have other names here, so
that an option that a user brings along is not taken, but the sentence that refuses it says what to
give instead. `docs/deepspeed_chat.md` shows this table.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Counterpart:
    """What an option of DeepSpeed-Chat is here."""

    options: tuple[str, ...] = ()
    """Options of `train.py` that stand for it, without dashes; a value may follow after a space."""

    settings: tuple[str, ...] = ()
    """Settings of single steps that do, each after its section."""

    remark: str = ""
    """How the value differs; without options and settings, why the option is to be left out."""


def counterpart(name: str) -> Counterpart | None:
    """What DeepSpeed-Chat's option `name` is here; None where it has no such option."""
    return COUNTERPARTS.get(name.replace("-", "_"))


def hint_for_train(name: str) -> str | None:
    """The end of train.py's sentence on an option that DeepSpeed-Chat has, and we don't."""
    found = counterpart(name)
    if found is None:
        return None
    options = [f"--{option.replace('_', '-')}" for option in found.options]
    return _hint(found, options or [f"--{setting}" for setting in found.settings])


def hint_for_step(name: str, known: Collection[str], section: str = "") -> str | None:
    """The same for a step's own command.

    Args:
        name: DeepSpeed-Chat's option.
        known: the step's settings, without the section.
        section: what stands before a setting's name: nothing, or "ppo." where train.py is meant.
    """
    found = counterpart(name)
    if found is None:
        return None
    settings = dict.fromkeys(setting.partition(".")[2] for setting in found.settings)
    here = [f"{section}{each}" for each in settings if each.partition(" ")[0] in known]
    if found.settings and not here:
        return None
    return _hint(found, here)


def _hint(found: Counterpart, here: list[str]) -> str:
    if not here:
        return f"leave DeepSpeed-Chat's out: {found.remark}"
    *first, last = here
    remark = f", {found.remark}" if found.remark else ""
    return f"DeepSpeed-Chat's is {', '.join(first)}{' or ' if first else ''}{last} here{remark}"


def _models(setting: str) -> tuple[str, ...]:
    """A setting of the models that learn in the steps."""
    models = ("sft.model", "reward.model", "ppo.actor", "ppo.critic", "preference.model")
    return tuple(f"{model}.{setting}" for model in models)


def _steps(setting: str) -> tuple[str, ...]:
    """A setting of the steps themselves."""
    return tuple(f"{step}.{setting}" for step in ("sft", "reward", "ppo", "preference"))


_WHOLE_BATCH = "which counts the micro-batches of all processes and accumulation steps together"

_DATA_AND_MODELS = {
    "model_name_or_path": Counterpart(
        ("actor_model", "reward_model"), ("sft.model.path", "reward.model.path")
    ),
    "actor_model_name_or_path": Counterpart(
        (), ("ppo.actor.path",), "and step 1's output without it"
    ),
    "critic_model_name_or_path": Counterpart(
        (), ("ppo.reward.path", "ppo.critic.path"), "and step 2's output without them"
    ),
    "sft_only_data_path": Counterpart((), ("sft.data.path",), "for all of step 1's rows"),
    "data_output_path": Counterpart(remark="no index of the rows is written"),
    "unsupervised_dataset_name": Counterpart((), ("ppo.ptx_data",), "a file or a set of the Hub"),
    "unsupervised_dataset_config_name": Counterpart(
        (), ("ppo.ptx_data",), "a file or a set of the Hub"
    ),
    "unsup_coef": Counterpart((), ("ppo.ptx_coef",), "a weight of the mean per token"),
    "preprocessing_num_workers": Counterpart(remark="rows become tokens in the step itself"),
    "max_seq_len": Counterpart(("max_length",), _steps("data.max_length")),
    "max_prompt_seq_len": Counterpart((), ("ppo.max_prompt_length",)),
    "max_answer_seq_len": Counterpart((), ("ppo.max_new_tokens",)),
    "num_padding_at_beginning": Counterpart(
        remark="tokens are masked by lengths, whatever a model's tokenizer puts first"
    ),
    "add_eot_token": Counterpart(("format",), _steps("data.format"), "which has an end of turns"),
    "eot_token": Counterpart(("format",), _steps("data.format"), "which has an end of turns"),
}

_BATCHES = {
    "per_device_train_batch_size": Counterpart(
        (), ("sft.micro_batch_size", "reward.micro_batch_size", "preference.micro_batch_size")
    ),
    "per_device_eval_batch_size": Counterpart(remark="evaluations take micro_batch_size"),
    "per_device_training_batch_size": Counterpart((), ("ppo.micro_batch_size",)),
    "per_device_generation_batch_size": Counterpart(
        (), ("ppo.rollout_size",), "which counts the responses of all processes"
    ),
    "generation_batches": Counterpart(
        (), ("ppo.rollout_size",), "which counts the responses of all batches and processes"
    ),
    "gradient_accumulation_steps": Counterpart(("batch_size",), _steps("batch_size"), _WHOLE_BATCH),
    "num_train_epochs": Counterpart(("epochs",), _steps("epochs")),
    "ppo_epochs": Counterpart((), ("ppo.ppo_epochs",)),
    "eval_interval": Counterpart((), _steps("eval_every")),
    "eval_iters": Counterpart((), _steps("data.max_eval_rows"), "which counts rows"),
    "enable_test_mode": Counterpart((), _steps("max_steps")),
    "test_stop_step": Counterpart((), _steps("max_steps")),
}

_OPTIMIZER = {
    "learning_rate": Counterpart(("lr",), _models("optim.lr")),
    "actor_learning_rate": Counterpart((), ("ppo.actor.optim.lr",)),
    "critic_learning_rate": Counterpart((), ("ppo.critic.optim.lr",)),
    "weight_decay": Counterpart((), _models("optim.weight_decay")),
    "actor_weight_decay": Counterpart((), ("ppo.actor.optim.weight_decay",)),
    "critic_weight_decay": Counterpart((), ("ppo.critic.optim.weight_decay",)),
    "lr_scheduler_type": Counterpart((), _models("optim.schedule")),
    "num_warmup_steps": Counterpart((), _models("optim.warmup_steps")),
    "beta": Counterpart((), ("preference.beta",)),
    "label_smoothing": Counterpart((), ("preference.label_smoothing",)),
    "enable_ema": Counterpart((), ("ppo.ema_decay 0.992",)),
}

_LORA = {
    "lora_dim": Counterpart(("lora",), _models("lora.rank")),
    "actor_lora_dim": Counterpart((), ("ppo.actor.lora.rank",)),
    "critic_lora_dim": Counterpart((), ("ppo.critic.lora.rank",)),
    "lora_module_name": Counterpart(
        (), _models("lora.targets"), "by the names of modules, as peft's"
    ),
    "actor_lora_module_name": Counterpart((), ("ppo.actor.lora.targets",)),
    "critic_lora_module_name": Counterpart((), ("ppo.critic.lora.targets",)),
    "lora_learning_rate": Counterpart((), _models("lora.lr")),
    "actor_lora_learning_rate": Counterpart((), ("ppo.actor.lora.lr",)),
    "critic_lora_learning_rate": Counterpart((), ("ppo.critic.lora.lr",)),
    "only_optimize_lora": Counterpart(remark="with --lora nothing but the adapters is trained"),
    "enable_mixed_precision_lora": Counterpart(
        ("quantize int8",), _models("quantize int8"), "which stores weights under adapters in bits"
    ),
}

_DROPOUT = dict.fromkeys(
    (
        *("dropout", "actor_dropout", "critic_dropout"),
        *("disable_dropout", "disable_actor_dropout", "disable_critic_dropout"),
    ),
    Counterpart(remark="dropout is off in every model"),
)

_ENGINE = {
    "deepspeed": Counterpart(remark="the engine is always this project's own"),
    "deepspeed_config": Counterpart(("zero_config",), (), "a DeepSpeed file as it is"),
    "local_rank": Counterpart(remark="processes are told their ranks by torchrun"),
    "zero_stage": Counterpart(("actor_zero_stage", "reward_zero_stage"), _models("zero_stage")),
    "critic_zero_stage": Counterpart(("reward_zero_stage",), ("ppo.critic.zero_stage",)),
    "offload": Counterpart((), _models("zero.offload.optimizer cpu")),
    "offload_reference_model": Counterpart(
        (), ("ppo.actor.zero.offload.params cpu",), "at stage 3, for actor and reference alike"
    ),
    "offload_reward_model": Counterpart(
        (), ("ppo.critic.zero.offload.params cpu",), "at stage 3, for both alike"
    ),
    "dtype": Counterpart((), _models("precision")),
    "compute_fp32_loss": Counterpart(remark="losses are always computed in fp32"),
    "gradient_checkpointing": Counterpart((), _models("gradient_checkpointing")),
    "actor_gradient_checkpointing": Counterpart((), ("ppo.actor.gradient_checkpointing",)),
    "critic_gradient_checkpointing": Counterpart((), ("ppo.critic.gradient_checkpointing",)),
    "align_overflow": Counterpart(
        remark="a model skips its own updates whose gradients are not finite"
    ),
    "enable_hybrid_engine": Counterpart(remark="step 3 always generates with the actor's weights"),
    "unpin_actor_parameters": Counterpart((), ("ppo.replica release",), "the default"),
    "release_inference_cache": Counterpart(remark="the cache is released after each rollout"),
    "tp_gather_partition_size": Counterpart(remark="weights are gathered block by block"),
    "inference_tp_size": Counterpart((), ("ppo.inference_tp_size",)),
}

_MESSAGES = {
    "print_loss": Counterpart(remark="it is printed, and in every line of metrics.jsonl"),
    "print_answers": Counterpart(remark="samples are printed every ppo.samples_every iterations"),
    "print_answers_interval": Counterpart((), ("ppo.samples_every",)),
    "enable_tensorboard": Counterpart((), _steps("trackers tensorboard")),
    "tensorboard_path": Counterpart(remark="its files are in the step's output directory"),
}

COUNTERPARTS: dict[str, Counterpart] = {
    **_DATA_AND_MODELS,
    **_BATCHES,
    **_OPTIMIZER,
    **_LORA,
    **_DROPOUT,
    **_ENGINE,
    **_MESSAGES,
}
"""By DeepSpeed-Chat's name. Options that are spelled alike in both are not here."""
