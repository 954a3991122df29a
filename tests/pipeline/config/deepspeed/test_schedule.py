from typing import Any

import pytest

from pipeline.config.deepspeed.read import read_deepspeed_config
from pipeline.config.deepspeed.schedule import OWN_SCHEDULES

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def settings(name: str, given: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    """What a file with this schedule and a rate of 1e-3 sets, without the optimizer's name."""
    content = {"optimizer": ADAMW, "scheduler": {"type": name, "params": params}}
    model = dict(read_deepspeed_config(content, given=given).model)
    model.pop("optim.name")
    return {key.removeprefix("optim."): value for key, value in model.items()}


def test_rates_become_the_peak_and_shares_of_it() -> None:
    assert settings(
        "WarmupLR",
        warmup_min_lr=5e-5,
        warmup_max_lr=2e-4,
        warmup_num_steps=10,
        warmup_type="linear",
    ) == {
        "schedule": "warmup",
        "lr": 2e-4,
        "warmup_steps": 10,
        "final_lr_ratio": 0.0,
        "schedule_params": {"warmup_type": "linear", "warmup_min_ratio": 0.25},
    }


def test_what_is_left_out_is_as_in_deepspeeds_constructors() -> None:
    common = {"warmup_steps": 1000, "final_lr_ratio": 0.0}

    assert settings("WarmupLR") == {"schedule": "warmup", "lr": 1e-3, **common}
    content = {"scheduler": {"type": "WarmupDecayLR"}}
    assert read_deepspeed_config(content).model["optim.lr"] == 1e-3
    assert settings("WarmupCosineLR")["final_lr_ratio"] == 1e-4
    assert settings("LRRangeTest")["lr"] == 1e-3


def test_auto_takes_what_is_known_of_the_run() -> None:
    autos = dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    )
    known = {"optim.warmup_steps": 30, "total_steps": 900, "optim.lr": 7e-7}

    assert settings("WarmupDecayLR", known, **autos) == {
        "schedule": "warmup_decay",
        "lr": 1e-3,  # the file's own rate comes before ours
        "warmup_steps": 30,
        "final_lr_ratio": 0.0,
        "schedule_params": {"total_num_steps": 900},
    }
    assert settings("WarmupDecayLR", **autos) == {
        "schedule": "warmup_decay",
        "lr": 1e-3,
        "final_lr_ratio": 0.0,
    }


def test_cosine_ends_at_its_share_of_the_peak() -> None:
    params = {"total_num_steps": 100, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.1}

    assert settings("WarmupCosineLR", warmup_num_steps=5, **params) == {
        "schedule": "warmup_cosine",
        "lr": 1e-3,
        "warmup_steps": 5,
        "final_lr_ratio": 0.1,
        "schedule_params": {"total_num_steps": 100, "warmup_min_ratio": 0.5},
    }


def test_one_cycle() -> None:
    params = {
        "cycle_first_step_size": 1000,
        "cycle_second_step_size": 500,
        "cycle_first_stair_count": 4,
        "cycle_second_stair_count": 2,
        "decay_step_size": 10,
        "decay_lr_rate": 0.5,
        "cycle_momentum": True,
        "cycle_min_mom": 0.7,
        "cycle_max_mom": 0.9,
    }

    assert settings(
        "OneCycle", cycle_min_lr=1e-4, cycle_max_lr=4e-4, decay_mom_rate=0, **params
    ) == {
        "schedule": "one_cycle",
        "lr": 4e-4,
        "final_lr_ratio": 0.0,
        "schedule_params": {"cycle_min_ratio": 0.25, **params},
    }


def test_lr_range_test() -> None:
    assert settings(
        "LRRangeTest",
        lr_range_test_min_lr=1e-6,
        lr_range_test_step_size=200,
        lr_range_test_step_rate=5,
        lr_range_test_staircase=True,
    ) == {
        "schedule": "lr_range_test",
        "lr": 1e-6,
        "final_lr_ratio": 0.0,
        "schedule_params": {"step_size": 200, "step_rate": 5.0, "staircase": True},
    }


@pytest.mark.parametrize("name", OWN_SCHEDULES)
def test_our_other_schedules_keep_their_names_and_parameters(name: str) -> None:
    assert settings(name.upper(), gamma=0.9, last_batch_iteration=-1) == {
        "lr": 1e-3,
        "schedule": name,
        "schedule_params": {"gamma": 0.9},
    }
