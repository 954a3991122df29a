"""Guards of preference training: signals, messages and rollbacks."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.guards.guards import Guards
from step3_preference.config import DEFAULT_GUARDS, GuardConfig, PreferenceConfig
from step3_preference.guards import PreferenceSignals
from step3_preference.train import train
from tests.distributed import run_ranks
from tests.step3_preference.toy import toy_config
from tests.test_resume import read_metrics

HEALTHY = {
    "logp_chosen": -0.8,
    "sampled_length": 10.0,
    "sampled_stop_rate": 1.0,
    "sampled_repetition": 0.02,
    "kl": 2.0,
}

CASES: tuple[tuple[str, dict[str, float], str], ...] = (
    ("kl_per_token>0.5", {"kl": 6.0}, "the KL to the initial actor is 0.6 nats per token"),
    (
        "chosen_nll>0.5",
        {"logp_chosen": -1.31},
        "the log-probability of held-out chosen responses fell from -0.8 to -1.31 nats per token",
    ),
    ("response_length<0.5", {"sampled_length": 4.9}, "responses went from 10 to 5 tokens"),
    ("response_length>3", {"sampled_length": 31.0}, "responses went from 10 to 31 tokens"),
    ("stop_rate>0.05", {"sampled_stop_rate": 0.94}, "94% of sampled responses end before"),
    ("repetition>0.3", {"sampled_repetition": 0.31}, "31% of tokens repeat a phrase"),
)

ALWAYS = GuardConfig(signal="repetition", limit=-1.0, window=1, action="rollback")
"""Exceeds its limit at each evaluation."""


@pytest.mark.parametrize(("name", "changes", "message"), CASES, ids=[row[0] for row in CASES])
def test_default_guard_warns_after_two_unhealthy_evaluations(
    name: str, changes: dict[str, float], message: str
) -> None:
    guards = Guards(DEFAULT_GUARDS, PreferenceSignals(), 5, first=HEALTHY)
    metrics = {**HEALTHY, **changes}
    assert name in map(str, DEFAULT_GUARDS)

    trips = [guards.check(5 * number, metrics) for number in range(1, 5)]

    warnings = [trip for new in trips for trip in new]
    assert [trip.step for trip in warnings] == [10]
    assert warnings[0].sentence.startswith(message)
    assert (warnings[0].window, warnings[0].unit) == (10, "step")
    assert guards.check(25, HEALTHY) == []
    one_truncated = {**HEALTHY, "sampled_stop_rate": 7 / 8}
    assert PreferenceSignals(prompts=8).compute_value("stop_rate", one_truncated, HEALTHY) == 0


def rollback_config(toy: Path, out: Path, **changes: Any) -> PreferenceConfig:
    """Return settings for two rollbacks from step 2 to the start, then a stop: six steps in all."""
    settings = {"guards": (ALWAYS,), "save_every": 1, "eval_every": 2, "max_steps": 4, **changes}
    return toy_config(toy, output_dir=out, **settings)


def _train(config: PreferenceConfig) -> None:
    train(config)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_rollback_halves_the_learning_rate_and_restores_the_start(
    processes: int, toy: Path, tmp_path: Path
) -> None:
    config = rollback_config(toy, tmp_path)
    run_ranks(_train, config, world_size=processes)

    lines = read_metrics(tmp_path)
    events = [line["guard"] for line in lines if "guard" in line]
    assert [(row["step"], row["action"], row["to"]) for row in events if "to" in row] == [
        (2, "rollback", 0),
        (2, "rollback", 0),
        (2, "stop", 0),
    ]
    steps = [line for line in lines if "grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2] * 3
    assert [line["lr"] for line in steps[::2]] == [1e-3, 5e-4, 2.5e-4]
    assert steps[0]["loss"] == steps[2]["loss"] == steps[4]["loss"]  # on the same rows
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["eval"]["kl"], result["eval"]["best_step"]) == (0, 0.0, 0)
    assert result["guards"] == [event for event in events if "to" in event]
