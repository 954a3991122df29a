"""DeepSpeed files as layers of a step's settings."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deepspeed import (
    BATCH_KEYS,
    IGNORED,
    SUPPORTED,
    deepspeed_layer,
    ignored_keys_notice,
)
from pipeline.settings.build import Layer, build_config
from pipeline.settings.fields import unflatten
from pipeline.system.errors import ConfigError
from step1_sft.config import SFTConfig
from tests.sources import ROOT

HUGGING_FACE_ZERO2 = """
{
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 500,
             "initial_scale_power": 12, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true,
        "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}
"""


DEEPSPEED_CHAT: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "memory_efficient_linear": False,
    },
    "fp16": {"enabled": True, "loss_scale_window": 100},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {"enabled": True, "max_out_tokens": 512, "inference_tp_size": 1},
    "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "step1"},
}


def write_json(directory: Path, content: dict[str, Any] | str) -> Path:
    path = directory / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def build(path: Path, settings: dict[str, Any] | None = None, *, world: int = 1) -> SFTConfig:
    layers = [Layer(settings or {}, "base")]
    return build_config(SFTConfig, [*layers, deepspeed_layer(SFTConfig, path, layers, world=world)])


def test_auto_values_come_from_our_settings(tmp_path: Path) -> None:
    settings = {
        "batch_size": 30,
        "micro_batch_size": 7,
        "model": {"precision": "bf16", "optim": {"lr": 2e-5, "betas": [0.9, 0.98]}},
    }

    config = build(write_json(tmp_path, HUGGING_FACE_ZERO2), settings, world=8)

    model = config.model
    assert (config.batch_size, config.micro_batch_size, model.precision) == (30, 7, "bf16")
    assert (model.optim.lr, model.optim.betas, model.optim.schedule) == (
        2e-5,
        (0.9, 0.98),
        "constant_with_warmup",
    )
    assert (model.zero_stage, model.zero.offload.optimizer) == (2, "cpu")
    assert (model.zero.offload.gradients, model.optim.max_grad_norm) == ("cpu", 1.0)
    assert (model.fp16.initial_scale_power, model.fp16.loss_scale_window) == (12, 500)
    content = {"zero_optimization": {"stage": "auto"}}
    assert build(write_json(tmp_path, content), {"model": {"zero_stage": 1}}).model.zero_stage == 1


def test_deepspeed_chat_config_is_read(tmp_path: Path) -> None:
    path = write_json(tmp_path, DEEPSPEED_CHAT)
    config = build(path, world=4)

    assert (config.batch_size, config.micro_batch_size) == (64, 4)
    assert (config.model.precision, config.model.fp16.loss_scale_window) == ("fp16", 100)
    assert config.trackers == ("tensorboard",)
    notice = ignored_keys_notice(path)
    assert notice is not None
    assert "hybrid_engine.enabled, hybrid_engine.max_out_tokens" in notice


@pytest.mark.parametrize(
    ("content", "world", "sizes"),
    [
        ({"train_batch_size": 64}, 4, (64, 8)),
        ({"train_micro_batch_size_per_gpu": 4}, 2, (8, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 2, (64, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, (24, 4)),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 4}, 2, (48, 6)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4}, 2, (32, 4)),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}, 2, (32, 8)),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, 1, (10, 4)),
        ({"train_batch_size": 5e8, "gradient_accumulation_steps": 1}, 1, (500_000_000,) * 2),
    ],
)
def test_batch_sizes_follow_from_the_deepspeed_keys(
    tmp_path: Path, content: dict[str, Any], world: int, sizes: tuple[int, int]
) -> None:
    path, settings = write_json(tmp_path, content), {"parallel": {"tp": 2, "pp": 2}}

    for config in (build(path, world=world), build(path, settings, world=4 * world)):
        assert (config.batch_size, config.micro_batch_size) == sizes


def test_scheduler_section_replaces_all_schedule_settings(tmp_path: Path) -> None:
    path = write_json(
        tmp_path,
        {
            "optimizer": {"type": "adam", "params": {"lr": 1e-4, "torch_adam": True}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": 1e-4,
                    "warmup_max_lr": 1e-3,
                    "warmup_num_steps": 7,
                    "total_num_steps": 90,
                    "last_batch_iteration": -1,
                },
            },
        },
    )
    base = {
        "model": {"optim": {"schedule": "polynomial", "warmup_steps": 10, "final_lr_ratio": 0.1}}
    }

    optim = build(path, base).model.optim

    assert optim.schedule == "linear"
    assert (optim.lr, optim.warmup_steps, optim.final_lr_ratio) == (1e-3, 7, 0.0)
    assert "scheduler.params.warmup_min_lr, scheduler.params.total_num_steps" in str(
        ignored_keys_notice(path)
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"type": "WarmupLR"}, ("constant_with_warmup", 1e-5, 1000, 0.0)),
        ({"type": "WarmupDecayLR"}, ("linear", 1e-3, 1000, 0.0)),
        (
            {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 7, "cos_min_ratio": 0.2}},
            ("cosine", 1e-5, 7, 0.2),
        ),
    ],
)
def test_schedules_use_deepspeed_defaults(
    tmp_path: Path, schedule: dict[str, Any], expected: tuple[object, ...]
) -> None:
    optim = build(write_json(tmp_path, {"scheduler": schedule})).model.optim

    assert (optim.schedule, optim.lr, optim.warmup_steps, optim.final_lr_ratio) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge in FILE is not supported"),
        ({"stage": 2}, "did you mean zero_optimization.stage"),
        ({"zero_optimization": {"cpu_offload": True}}, "or zero_optimization.offload_optimizer?"),
        ({"fp16": "yes"}, "fp16 in FILE must be an object"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true; keep one"),
        ({"train_batch_size": 0}, "train_batch_size in FILE must be a positive integer"),
        (
            dict(zip(BATCH_KEYS, (10, 4, 2), strict=True)),
            "is 10, which is not train_micro_batch_size_per_gpu (4) x gradient_accumulation_steps"
            " (2) x 1 data-parallel process",
        ),
        (
            {"train_batch_size": 10, "gradient_accumulation_steps": 4},
            "is 10, which is not a multiple of gradient_accumulation_steps (4) x 1 data-parallel",
        ),
        ({"communication_data_type": [1]}, "model.zero.reduce_dtype in FILE must be one of"),
        ({"scheduler": {"type": False}}, "scheduler.type in FILE is False, which is not supported"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type in FILE is OneCycle, which is not"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"power": 2}}},
            "scheduler.params.power in FILE is not supported",
        ),
        # Values are checked like our settings.
        ({"zero_optimization": {"stage": 4}}, "model.zero_stage in FILE must be one of 0, 1, 2, 3"),
        (
            {"optimizer": {"type": "Lamb"}},
            "optimizer.type in FILE is Lamb, which is not supported; use AdamW",
        ),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "use AdamW"),
        (
            {"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}},
            "optimizer.params.amsgrad in FILE is not supported",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}},
            "optimizer.params.bias_correction in FILE is not supported",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "model.zero.offload.params in FILE cpu needs zero_stage 3",
        ),
        ('{"fp16": {}, "fp16": {}}', "has fp16 twice"),
        ('{"fp16": }', "is not valid JSON: Expecting value at line 1"),
        ("[]", "must contain one JSON object"),
    ],
)
def test_invalid_deepspeed_file_raises(
    tmp_path: Path, content: dict[str, Any] | str, message: str
) -> None:
    path = write_json(tmp_path, content)

    with pytest.raises(ConfigError, match=re.escape(message.replace("FILE", str(path)))):
        build(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("amp", {"enabled": True}),
        ("moe", {"level": 7}),
        ("zero_optimization.zero_quantized_weights", True),
        ("zero_optimization.mics_shard_size", 4),
    ],
)
def test_unavailable_feature_raises_unless_disabled(
    tmp_path: Path, key: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} in .*ds.json is not supported"):
        ignored_keys_notice(write_json(tmp_path, unflatten({key: value})))
    disabled = [{key: None}, {key: False}, {key: {"enabled": False}}]
    for content in (*disabled, {"zero_optimization.mics_shard_size": -1}):
        assert ignored_keys_notice(write_json(tmp_path, unflatten(content))) is None


def test_documentation_lists_every_key() -> None:
    text = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")

    assert [key for key in (*SUPPORTED, *IGNORED) if f"`{key}`" not in text] == []
