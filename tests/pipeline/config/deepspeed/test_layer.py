import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import StepConfig
from pipeline.config.deepspeed.layer import deepspeed_layer
from pipeline.errors import ConfigError
from pipeline.settings.build import Layer, build_config
from pipeline.settings.plain import Option
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig


def written(tmp_path: Path, **content: object) -> Path:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(content))
    return file


def applied(
    path: Path,
    config_class: Any = SFTConfig,
    below: dict[str, Any] | None = None,
    *overrides: Option,
    world: int = 1,
) -> Any:
    """The step's settings with the file over `below` and under `overrides`."""
    layers = [Layer(below or {}, "below")]
    layer = deepspeed_layer(config_class, path, world=world, layers=layers, overrides=overrides)
    return build_config(config_class, [*layers, layer], overrides)


def test_every_model_that_trains_gets_the_files_settings(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}},
        bf16={"enabled": True},
        gradient_clipping=0.5,
        train_batch_size=32,
        tensorboard={"enabled": True},
    )

    config = applied(path, PPOConfig, world=4)

    for model in (config.actor, config.critic):
        assert (model.zero_stage, model.zero.offload.params, model.precision) == (3, "cpu", "bf16")
        assert model.optim.max_grad_norm == 0.5
    assert config.reward.precision == "auto"
    assert (config.batch_size, config.micro_batch_size) == (32, 8)
    assert config.trackers == ("tensorboard",)


def test_auto_takes_each_models_own_settings(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}},
        gradient_clipping="auto",
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
    )
    below = {"batch_size": 48, "critic": {"optim": {"lr": 3e-4, "max_grad_norm": None}}}

    config = applied(path, PPOConfig, below, ("actor.optim.lr", ["2e-6"]))

    assert (config.actor.optim.lr, config.critic.optim.lr) == (2e-6, 3e-4)
    assert config.actor.optim.betas == (0.9, 0.999)  # step 3's own default
    assert (config.actor.optim.eps, config.critic.optim.eps) == (1e-6, 1e-6)
    assert (config.actor.optim.max_grad_norm, config.critic.optim.max_grad_norm) == (1.0, None)
    assert (config.batch_size, config.micro_batch_size) == (48, 8)


def test_batch_sizes_hold_for_the_processes_of_the_step(tmp_path: Path) -> None:
    path = written(tmp_path, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)

    assert applied(path, world=4).batch_size == 24
    with pytest.raises(ConfigError, match=r"ds_config.json: train_batch_size 9 can't be shared"):
        applied(written(tmp_path, train_batch_size=9), world=2)


@pytest.mark.parametrize(
    ("train", "world", "micro"), [(64, 2, 8), (16, 4, 4), (36, 2, 6), (14, 1, 7), (2, 2, 1)]
)
def test_an_automatic_micro_batch_divides_the_share_of_a_process(
    tmp_path: Path, train: int, world: int, micro: int
) -> None:
    path = written(tmp_path, train_batch_size=train, train_micro_batch_size_per_gpu="auto")

    config = applied(path, world=world)  # whose own micro-batch is 8

    assert (config.batch_size, config.micro_batch_size) == (train, micro)


def test_a_named_optimizer_or_schedule_is_a_whole_one(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        optimizer={"type": "AdamW", "params": {"lr": 1e-4}},
        scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1e-3}},
    )
    below = {
        "model": {
            "optim": {
                "name": "SGD",
                "params": {"momentum": 0.9},
                "schedule": "polynomial",
                "schedule_params": {"power": 2},
                "warmup_steps": 10,
                "final_lr_ratio": 0.1,
            }
        }
    }

    optim = applied(path, SFTConfig, below).model.optim

    assert (optim.name, optim.params, optim.schedule) == ("AdamW", {}, "one_cycle")
    assert (optim.warmup_steps, optim.final_lr_ratio) == (None, 0.0)
    assert "power" not in optim.schedule_params


def test_what_contradicts_the_file_alone_may_stand_above_it(tmp_path: Path) -> None:
    path = written(tmp_path, zero_optimization={"stage": 3})

    config = applied(path, SFTConfig, None, ("model.zero.offload.params", ["cpu"]))

    assert (config.model.zero_stage, config.model.zero.offload.params) == (3, "cpu")


def test_a_wrong_setting_beside_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^batch_size must be a whole number, got x"):
        applied(written(tmp_path), SFTConfig, None, ("batch_size", ["x"]))


def test_where_nothing_is_trained_there_is_nothing_to_set(tmp_path: Path) -> None:
    path = written(tmp_path)

    with pytest.raises(ConfigError, match=r"^--zero-config .*: no model is trained here"):
        deepspeed_layer(StepConfig, path, world=1, layers=[])
