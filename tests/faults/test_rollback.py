"""A run that is killed during a rollback resumes to the result of an uninterrupted one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import StepConfig
from step3_ppo.config import PPOConfig
from step3_ppo.guard_settings import GuardConfig
from step3_preference.config import GuardConfig as PreferenceGuard
from step3_preference.config import PreferenceConfig
from tests.faults.jobs import Forked, run_forked, small_job
from tests.step3_preference.toy import save_toy, toy_config
from tests.test_resume import read_exported, read_metrics

ALWAYS = GuardConfig(signal="repetition", limit=-1.0, window=2, action="rollback")
"""Exceeds its limit from the first iteration on, so that only the initial state is healthy."""

POINTS = [
    ("rollback.before_record", 1),
    ("rollback.after_record", 1),
    ("rollback.before_removal", 1),
    ("rollback.after_record", 2),
    ("rollback.before_record", 3),
    ("rollback.after_record", 3),
    ("checkpoint.after_rename", 4),
]


def ppo_config(inputs: Path, out: Path) -> PPOConfig:
    """Return settings for two rollbacks from iteration 2 and a stop: six iterations in total."""
    return small_job(inputs, "ppo", output_dir=out, guards=(ALWAYS,), keep_last=2, eval_every=1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("preference")
    save_toy(directory)
    return directory


@pytest.fixture(scope="module")
def ppo_reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    assert run_forked(ppo_config(inputs, out)) == [0, 0]
    return out


@pytest.mark.faults
def test_each_rollback_halves_the_learning_rate_and_resamples(ppo_reference: Path) -> None:
    lines = read_metrics(ppo_reference)
    events = [line["guard"] for line in lines if "guard" in line]
    actions = [event for event in events if event["action"] != "warn"]
    logged = [line for line in lines if "kl_coef" in line]

    assert [(event["step"], event["action"], event["to"]) for event in actions] == [
        (2, "rollback", 0),
        (2, "rollback", 0),
        (2, "stop", 0),
    ]
    assert [line["step"] for line in logged] == [1, 2] * 3
    first = logged[0]
    for attempt, line in enumerate(logged[::2]):
        assert line["lr"] == first["lr"] / 2**attempt
        assert line["critic_lr"] == first["critic_lr"] / 2**attempt
        assert line["kl_coef"] == first["kl_coef"] * 2**attempt
    assert len({line["entropy"] for line in logged[::2]}) == 3  # other responses
    result = json.loads((ppo_reference / "result.json").read_text())
    assert (result["steps"], result["eval"]["kl"], result["eval"]["best_step"]) == (0, 0.0, 0)
    assert result["guards"] == actions


def check_resumed(config: StepConfig, reference: Path, *, kill: tuple[str, int]) -> None:
    """Kill a run when it reaches a point for the n-th time; resume and compare it."""
    with Forked(config, fault="{}:0:{}:kill".format(*kill)) as job:
        assert job.wait()[0] == -9
    assert run_forked(replace(config, resume=True)) == [0, 0]

    for read in (read_metrics, read_exported, read_outcome):
        assert read(config.output_dir) == read(reference)


@pytest.mark.faults
@pytest.mark.parametrize(("point", "count"), POINTS)
def test_ppo_killed_during_rollback_resumes_bitwise(
    point: str, count: int, inputs: Path, ppo_reference: Path, tmp_path: Path
) -> None:
    check_resumed(ppo_config(inputs, tmp_path), ppo_reference, kill=(point, count))


@pytest.fixture(scope="module")
def dpo_reference(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dpo_reference")
    assert run_forked(dpo_config(toy, out)) == [0, 0]
    return out


def dpo_config(toy: Path, out: Path) -> PreferenceConfig:
    """Return the same settings for DPO."""
    always = PreferenceGuard(signal="repetition", limit=-1.0, window=1, action="rollback")
    settings = {"guards": (always,), "save_every": 1, "eval_every": 2, "max_steps": 4}
    return toy_config(toy, output_dir=out, **settings)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("point", "count"),
    [("rollback.before_record", 1), ("rollback.after_record", 2), ("rollback.before_removal", 3)],
)
def test_dpo_killed_during_rollback_resumes_bitwise(
    point: str, count: int, toy: Path, dpo_reference: Path, tmp_path: Path
) -> None:
    check_resumed(dpo_config(toy, tmp_path), dpo_reference, kill=(point, count))


def read_outcome(out: Path) -> tuple[list[str], Any]:
    """Return the names of the checkpoints, and the result without times."""
    result = json.loads((out / "result.json").read_text())
    del result["seconds"], result["changed_settings"]
    return sorted(path.name for path in (out / "checkpoints").iterdir()), result
