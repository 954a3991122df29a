"""A run that is killed while it goes back, and resumed, ends as one that was not killed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from step3_ppo.config import PPOConfig
from step3_ppo.guard_settings import GuardConfig
from step3_preference.config import GuardConfig as PreferenceGuard
from step3_preference.config import PreferenceConfig
from tests.faults.jobs import Forked, run_forked, small
from tests.step3_preference.toy import save_toy, toy_config
from tests.test_resume import read_exported, read_metrics

ALWAYS = GuardConfig(signal="repetition", limit=-1.0, window=2, action="rollback")
"""Beyond its limit from the first iteration on: only the start is healthy."""

POINTS = [
    ("rollback.before_record", 1),
    ("rollback.after_record", 1),
    ("rollback.before_removal", 1),
    ("rollback.after_record", 2),
    ("rollback.before_record", 3),
    ("rollback.after_record", 3),
    ("checkpoint.after_rename", 4),
]


def guarded(start: Path, out: Path) -> PPOConfig:
    """Two rollbacks from iteration 2 to the start, and the end there: six iterations in all."""
    return small(start, "ppo", output_dir=out, guards=(ALWAYS,), keep_last=2, eval_every=1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("preference")
    save_toy(directory)
    return directory


@pytest.fixture(scope="module")
def whole(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    assert run_forked(guarded(start, out)) == [0, 0]
    return out


@pytest.mark.faults
def test_each_rollback_learns_half_as_fast_from_other_responses(whole: Path) -> None:
    lines = read_metrics(whole)
    events = [line["guard"] for line in lines if "guard" in line]
    acted = [each for each in events if each["action"] != "warn"]
    logged = [line for line in lines if "kl_coef" in line]

    assert [(each["step"], each["action"], each["to"]) for each in acted] == [
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
    assert len({line["entropy"] for line in logged[::2]}) == 3  # of one model: other responses
    result = json.loads((whole / "result.json").read_text())
    assert (result["steps"], result["eval"]["kl"], result["eval"]["best_step"]) == (0, 0.0, 0)
    assert result["guards"] == acted


@pytest.mark.faults
@pytest.mark.parametrize(("point", "visit"), POINTS)
def test_a_run_that_is_killed_while_it_goes_back_ends_as_the_whole_one(
    point: str, visit: int, start: Path, whole: Path, tmp_path: Path
) -> None:
    config = guarded(start, tmp_path)
    with Forked(config, fault=f"{point}:0:{visit}:kill") as job:
        codes = job.wait()
    assert codes[0] == -9

    assert run_forked(replace(config, resume=True)) == [0, 0]

    assert read_metrics(tmp_path) == read_metrics(whole)
    assert read_exported(tmp_path) == read_exported(whole)
    assert left(tmp_path) == left(whole)


@pytest.fixture(scope="module")
def whole_dpo(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole_dpo")
    assert run_forked(preferring(toy, out)) == [0, 0]
    return out


def preferring(toy: Path, out: Path) -> PreferenceConfig:
    """The same of a run that learns from pairs."""
    always = PreferenceGuard(signal="repetition", limit=-1.0, window=1, action="rollback")
    settings = {"guards": (always,), "save_every": 1, "eval_every": 2, "max_steps": 4}
    return toy_config(toy, output_dir=out, **settings)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("point", "visit"),
    [("rollback.before_record", 1), ("rollback.after_record", 2), ("rollback.before_removal", 3)],
)
def test_a_run_on_pairs_that_is_killed_while_it_goes_back_ends_as_the_whole_one(
    point: str, visit: int, toy: Path, whole_dpo: Path, tmp_path: Path
) -> None:
    config = preferring(toy, tmp_path)
    with Forked(config, fault=f"{point}:0:{visit}:kill") as job:
        codes = job.wait()
    assert codes[0] == -9

    assert run_forked(replace(config, resume=True)) == [0, 0]

    assert read_metrics(tmp_path) == read_metrics(whole_dpo)
    assert read_exported(tmp_path) == read_exported(whole_dpo)
    assert left(tmp_path) == left(whole_dpo)


def left(out: Path) -> tuple[list[str], Any]:
    """Names of the checkpoints, and what the result says but for the time."""
    result = json.loads((out / "result.json").read_text())
    del result["seconds"], result["changed_settings"]
    return sorted(path.name for path in (out / "checkpoints").iterdir()), result
