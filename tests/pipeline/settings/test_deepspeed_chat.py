"""What DeepSpeed-Chat's options are here: the table, its sentences and its page."""

from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, UserErrors
from pipeline.plan.request import Request, parse_request
from pipeline.settings.build import build_config
from pipeline.settings.deepspeed_chat import COUNTERPARTS, Counterpart
from pipeline.settings.describe import list_settings
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from train import STAGES

DOCS = Path(__file__).parents[3] / "docs" / "deepspeed_chat.md"

OF_MAIN_PY = set(
    """
    data_output_path sft_only_data_path model_name_or_path per_device_train_batch_size
    per_device_eval_batch_size max_seq_len learning_rate weight_decay num_train_epochs
    gradient_accumulation_steps lr_scheduler_type num_warmup_steps local_rank
    gradient_checkpointing dropout offload dtype zero_stage lora_dim lora_module_name
    only_optimize_lora lora_learning_rate compute_fp32_loss enable_tensorboard tensorboard_path
    add_eot_token eot_token print_loss num_padding_at_beginning eval_interval eval_iters beta
    label_smoothing offload_reference_model unsupervised_dataset_name
    unsupervised_dataset_config_name unsup_coef actor_model_name_or_path critic_model_name_or_path
    per_device_generation_batch_size per_device_training_batch_size generation_batches ppo_epochs
    max_prompt_seq_len max_answer_seq_len actor_learning_rate critic_learning_rate
    actor_weight_decay critic_weight_decay preprocessing_num_workers enable_hybrid_engine
    unpin_actor_parameters release_inference_cache inference_tp_size tp_gather_partition_size
    offload_reward_model critic_zero_stage actor_gradient_checkpointing
    critic_gradient_checkpointing actor_dropout critic_dropout actor_lora_dim
    actor_lora_module_name critic_lora_dim critic_lora_module_name actor_lora_learning_rate
    critic_lora_learning_rate enable_ema enable_mixed_precision_lora align_overflow print_answers
    print_answers_interval enable_test_mode test_stop_step deepspeed deepspeed_config
    """.split()  # noqa: SIM905
)
"""Of the steps' main.py, without those that mean the same here: data_path, seed, ..."""

OF_OLDER_ONES = {"disable_dropout", "disable_actor_dropout", "disable_critic_dropout"}


def test_every_option_has_a_counterpart_or_a_reason_and_names_only_what_exists() -> None:
    own = {each.name for each in fields(Request)}
    of_steps = {
        setting.name
        for stage in STAGES
        for setting in list_settings(stage.config_class, f"{stage.section}.")
    }

    assert COUNTERPARTS.keys() == {*OF_MAIN_PY, *OF_OLDER_ONES}
    assert not COUNTERPARTS.keys() & own
    for name, found in COUNTERPARTS.items():
        assert found.options or found.settings or found.remark, name
        assert {each.partition(" ")[0] for each in found.options} <= own, name
        assert {each.partition(" ")[0] for each in found.settings} <= of_steps, name


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--lora_dim", "there is no option --lora-dim; DeepSpeed-Chat's is --lora here"),
        (
            "--enable_ema",
            "there is no option --enable-ema; DeepSpeed-Chat's is --ppo.ema_decay 0.992 here",
        ),
        (
            "--per-device-train-batch-size",
            "there is no option --per-device-train-batch-size; DeepSpeed-Chat's is"
            " --sft.micro_batch_size, --reward.micro_batch_size or --preference.micro_batch_size"
            " here",
        ),
        (
            "--gradient_accumulation_steps",
            "there is no option --gradient-accumulation-steps; DeepSpeed-Chat's is --batch-size"
            " here, which counts the micro-batches of all processes and accumulation steps"
            " together",
        ),
        (
            "--disable_actor_dropout",
            "there is no option --disable-actor-dropout; leave DeepSpeed-Chat's out: dropout is"
            " off in every model",
        ),
    ],
)
def test_train_says_what_to_give_instead(option: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_request([option, "1"], STAGES)

    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("config_class", "section", "option", "hint"),
    [
        (RewardConfig, "", "lora_dim", "DeepSpeed-Chat's is model.lora.rank here"),
        (
            PPOConfig,
            "ppo.",
            "actor_lora_dim",
            "DeepSpeed-Chat's is ppo.actor.lora.rank here",
        ),
        (
            PPOConfig,
            "",
            "weight_decay",
            "DeepSpeed-Chat's is actor.optim.weight_decay or critic.optim.weight_decay here",
        ),
        (RewardConfig, "", "enable_ema", "--help lists the settings"),
    ],
)
def test_a_step_names_its_own_settings(
    config_class: type, section: str, option: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(config_class, [], [(option, ["1"])], section=section)

    assert str(error.value) == f"there is no setting {section}{option}; {hint}"


def test_all_options_that_do_not_exist_are_named_at_once() -> None:
    unknown = ["--deepspeed", "--zzz", "1", "--lora-dim", "8"]
    with pytest.raises(UserErrors) as of_train:
        parse_request(["--step", "1", *unknown], STAGES)
    with pytest.raises(UserErrors) as of_step:
        build_config(RewardConfig, [], [("dtype", ["bf16"]), ("seed", ["1"]), ("zzz", [])])

    assert [each.partition(";")[0] for each in of_train.value.sentences] == [
        "there is no option --deepspeed",
        "there is no option --zzz",
        "there is no option --lora-dim",
    ]
    assert len(of_step.value.sentences) == 2


def test_the_page_has_the_table() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()

    assert [line for line in lines if line.startswith("| `--")] == [
        documented(name, found) for name, found in COUNTERPARTS.items()
    ]


def documented(name: str, found: Counterpart) -> str:
    """A row of the page's table, in which MODEL and STEP stand for all there are."""
    settings = found.settings
    for word, count, first in (("MODEL", 5, "sft.model"), ("STEP", 4, "sft")):
        if len(settings) == count:
            settings = (settings[0].replace(first, word, 1),)
    options = [f"`--{option.replace('_', '-')}`" for option in found.options]
    here = ", ".join([*options, *(f"`--{setting}`" for setting in settings)])
    return f"| `--{name}` | {here or '-'} | {found.remark} |"
