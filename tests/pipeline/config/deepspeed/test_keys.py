import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deepspeed.keys import KEYS
from pipeline.config.deepspeed.read import read_deepspeed_config
from pipeline.errors import ConfigError

DOCS = Path(__file__).parents[4] / "docs" / "deepspeed.md"


def nested(key: str, value: object) -> dict[str, Any]:
    for word in reversed(key.split(".")):
        value = {word: value}
    return value  # pyright: ignore[reportReturnType]


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for tree in trees:
        for word, value in tree.items():
            inner = isinstance(value, dict) and isinstance(whole.get(word), dict)
            whole[word] = merged(whole[word], value) if inner else value
    return whole


ADAMW = nested("optimizer.type", "AdamW")
WARMUP = nested("scheduler.type", "WarmupLR")
FP16 = nested("fp16.enabled", True)
STAGE_3 = nested("zero_optimization.stage", 3)
NVME = merged(
    STAGE_3,
    nested("zero_optimization.offload_optimizer", {"device": "nvme", "nvme_path": "/disk"}),
    nested("zero_optimization.offload_param", {"device": "nvme", "nvme_path": "/disk"}),
)
PINNED = {"zero.offload.pin_memory": False}

USED: dict[str, tuple[object, dict[str, Any], dict[str, Any]]] = {
    "train_batch_size": (8, {}, {"batch_size": 8, "micro_batch_size": 4}),
    "train_micro_batch_size_per_gpu": (4, {}, {"batch_size": 8, "micro_batch_size": 4}),
    "gradient_accumulation_steps": (
        2,
        {"train_batch_size": 8},
        {"batch_size": 8, "micro_batch_size": 2},
    ),
    "gradient_accumulation": (
        2,
        {"train_batch_size": 8},
        {"batch_size": 8, "micro_batch_size": 2},
    ),
    "gradient_clipping": (0.5, {}, {"optim.max_grad_norm": 0.5}),
    "optimizer.type": ("SGD", {}, {"optim.name": "SGD"}),
    "optimizer.params": ({"lr": 1e-4, "amsgrad": True}, ADAMW, {"optim.params": {"amsgrad": True}}),
    "communication_data_type": ("bf16", {}, {"zero.reduce_dtype": "bf16"}),
    "scheduler.type": ("WarmupCosineLR", {}, {"optim.schedule": "warmup_cosine"}),
    "scheduler.params": (
        {"warmup_type": "linear"},
        WARMUP,
        {"optim.schedule_params": {"warmup_type": "linear"}},
    ),
    "fp16.enabled": (True, {}, {"precision": "fp16"}),
    "fp16.loss_scale": (128, FP16, {"fp16.loss_scale": 128.0}),
    "fp16.initial_scale_power": (20, FP16, {"fp16.initial_scale_power": 20}),
    "fp16.loss_scale_window": (50, FP16, {"fp16.loss_scale_window": 50}),
    "fp16.hysteresis": (4, FP16, {"fp16.hysteresis": 4}),
    "fp16.consecutive_hysteresis": (True, FP16, {"fp16.consecutive_hysteresis": True}),
    "fp16.min_loss_scale": (0.5, FP16, {"fp16.min_loss_scale": 0.5}),
    "bf16.enabled": (True, {}, {"precision": "bf16"}),
    "data_types.param_dtype": ("bf16", {}, {"precision": "bf16"}),
    "zero_optimization.stage": (1, {}, {"zero_stage": 1}),
    "zero_optimization.offload_optimizer.device": (
        "cpu",
        STAGE_3,
        {"zero.offload.optimizer": "cpu", "zero.offload.gradients": "cpu"},
    ),
    "zero_optimization.offload_optimizer.nvme_path": (
        "/disk",
        NVME,
        {"zero.offload.optimizer": "nvme", "zero.offload.nvme_path": "/disk"},
    ),
    "zero_optimization.offload_optimizer.pin_memory": (False, {}, PINNED),
    "zero_optimization.offload_param.device": ("cpu", STAGE_3, {"zero.offload.params": "cpu"}),
    "zero_optimization.offload_param.nvme_path": (
        "/disk",
        NVME,
        {"zero.offload.params": "nvme", "zero.offload.nvme_path": "/disk"},
    ),
    "zero_optimization.offload_param.pin_memory": (False, {}, PINNED),
    "zero_optimization.cpu_offload": (True, {}, {"zero.offload.optimizer": "cpu"}),
    "zero_optimization.cpu_offload_param": (True, STAGE_3, {"zero.offload.params": "cpu"}),
    "zero_optimization.cpu_offload_params": (True, STAGE_3, {"zero.offload.params": "cpu"}),
    "zero_optimization.cpu_offload_use_pin_memory": (False, {}, PINNED),
    "zero_optimization.stage3_prefetch_bucket_size": (0, {}, {"zero.prefetch_units": 0}),
    "zero_optimization.prefetch_bucket_size": (0, {}, {"zero.prefetch_units": 0}),
    "compile.deepcompile": (True, {}, {"zero.compile": True}),
    "compile.enabled": (False, {}, {"zero.compile": False}),
    "tensorboard.enabled": (True, {}, {"trackers": ("tensorboard",)}),
    "wandb.enabled": (True, {}, {"trackers": ("wandb",)}),
}
"""Key to a value, what the file needs besides, and what it sets on 2 processes."""


def keys_of(fate: str) -> list[str]:
    return [name for name, key in KEYS.items() if key.fate == fate]


def test_every_used_key_is_shown_here() -> None:
    assert sorted(USED) == sorted(keys_of("used"))


@pytest.mark.parametrize("key", keys_of("used"))
def test_a_used_key_sets_what_it_says(key: str) -> None:
    value, context, expected = USED[key]

    settings = read_deepspeed_config(merged(context, nested(key, value)), world=2)

    both = {**settings.model, **settings.step}
    assert expected.items() <= both.items()
    if key.startswith("optimizer.params"):
        assert both["optim.lr"] == 1e-4
    assert settings.notice() is None


@pytest.mark.parametrize("key", keys_of("no effect"))
@pytest.mark.parametrize("value", [1, "auto"])
def test_a_key_without_effect_is_noted_and_sets_nothing(key: str, value: object) -> None:
    settings = read_deepspeed_config(nested(key, value))

    assert {**settings.model, **settings.step} == {}
    assert settings.no_effect == {key: KEYS[key].text}
    assert str(settings.notice()).splitlines()[1] == f"  {key}: {KEYS[key].text}"


@pytest.mark.parametrize("key", keys_of("refused"))
def test_a_refused_key_is_named_unless_it_asks_for_nothing(key: str) -> None:
    asks = next(value for value in (True, 2, False) if not KEYS[key].asks_for_nothing(value))

    with pytest.raises(ConfigError) as error:
        read_deepspeed_config(nested(key, asks))

    assert str(error.value) == f"{key} in the DeepSpeed configuration {KEYS[key].text}"
    for nothing in KEYS[key].neutral:
        assert read_deepspeed_config(nested(key, nothing)).model == {}


@pytest.mark.parametrize(
    ("section", "content", "refused"),
    [
        ("amp", {"enabled": True, "opt_level": "O1"}, True),
        ("amp", {"enabled": "auto", "opt_level": "auto"}, False),
        ("compression_training", {"weight_quantization": {"shared": {"enabled": False}}}, False),
        ("compression_training", {"weight_quantization": {"shared": {"enabled": True}}}, True),
        ("sparse_attention", {"mode": "fixed", "block": 16}, True),
        ("tensor_parallel", {"autotp_size": 1}, False),
        ("tensor_parallel", {"autotp_size": 4}, True),
        ("curriculum_learning", {}, False),
    ],
)
def test_a_refused_section_passes_where_it_is_switched_off(
    section: str, content: dict[str, object], *, refused: bool
) -> None:
    if not refused:
        assert read_deepspeed_config({section: content}).notice() is None
        return
    with pytest.raises(ConfigError, match=f"^{section} in "):
        read_deepspeed_config({section: content})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train_batchsize", "did you mean train_batch_size?"),
        ("stage", "did you mean zero_optimization.stage?"),
        ("offload_param", "did you mean zero_optimization.offload_param?"),
        ("zero_optimization.stages", "did you mean zero_optimization.stage?"),
        (
            "zero_optimization.offload_optimizer.pin_memry",
            "did you mean zero_optimization.offload_optimizer.pin_memory?",
        ),
        ("zero_optimisation", "did you mean zero_optimization?"),
        ("fp16.initial_scale", "did you mean fp16.initial_scale_power?"),
        ("learning_rate_of_my_dog", "docs/deepspeed.md lists the keys; remove it"),
    ],
)
def test_an_unknown_key_is_refused_with_a_hint(key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_deepspeed_config(nested(key, 1))

    assert str(error.value) == (
        f"{key} in the DeepSpeed configuration is not a key of DeepSpeed's configuration; {hint}"
    )


def test_the_documentation_shows_every_key_and_its_fate() -> None:
    shown: dict[str, str] = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if row := re.fullmatch(r"\| (`.*`) \| (.*) \|", line):
            shown |= dict.fromkeys(re.findall(r"`([^`]+)`", row[1]), row[2])

    assert shown == {name: key.text for name, key in KEYS.items()}
