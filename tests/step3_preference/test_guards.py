"""Guards of a run that learns from preferences: what they look at, say and do."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.guards.guards import Guards
from step3_preference.config import WARNING, GuardConfig, PreferenceConfig
from step3_preference.guards import PreferenceSignals
from step3_preference.train import train
from tests.distributed import run_ranks
from tests.step3_preference.toy import metrics, toy_config

SOUND = {
    "logp_chosen": -0.8,
    "sampled_length": 10.0,
    "sampled_stop_rate": 1.0,
    "sampled_repetition": 0.02,
    "kl": 2.0,
}

WRONG: tuple[tuple[str, dict[str, float], str], ...] = (
    ("kl_per_token>0.5", {"kl": 6.0}, "the KL to the initial actor is 0.6 nats per token"),
    (
        "chosen_nll>0.5",
        {"logp_chosen": -1.31},
        "held-out chosen responses went from -0.8 to -1.31 nats per token",
    ),
    ("response_length<0.5", {"sampled_length": 4.9}, "responses went from 10 to 5 tokens"),
    ("response_length>3", {"sampled_length": 31.0}, "responses went from 10 to 31 tokens"),
    ("stop_rate>0.05", {"sampled_stop_rate": 0.94}, "94% of sampled responses end before"),
    ("repetition>0.3", {"sampled_repetition": 0.31}, "31% of tokens repeat a phrase"),
)

ALWAYS = GuardConfig(signal="repetition", limit=-1.0, window=1, action="rollback")
"""Beyond its limit at each evaluation."""


def guards(*given: GuardConfig, interval: int = 5) -> Guards:
    return Guards(given or WARNING, PreferenceSignals(), interval, first=SOUND)


@pytest.mark.parametrize(("name", "changes", "sentence"), WRONG, ids=[each[0] for each in WRONG])
def test_each_usual_signal_is_one_sentence_after_two_evaluations(
    name: str, changes: dict[str, float], sentence: str
) -> None:
    watched, wrong = guards(), {**SOUND, **changes}
    assert name in map(str, WARNING)

    trips = [watched.check(5 * place, wrong) for place in range(1, 5)]

    spoke = [trip for each in trips for trip in each]
    assert [trip.step for trip in spoke] == [10]
    assert spoke[0].sentence.startswith(sentence)
    assert (spoke[0].window, spoke[0].unit) == (10, "step")
    assert watched.check(25, SOUND) == []
    cut_off = {**SOUND, "sampled_stop_rate": 7 / 8}
    assert PreferenceSignals(prompts=8).compute_value("stop_rate", cut_off, SOUND) == 0


def guarded(toy: Path, out: Path, **changes: Any) -> PreferenceConfig:
    """Two rollbacks from step 2 to the start, and the end there: six steps in all."""
    settings = {"guards": (ALWAYS,), "save_every": 1, "eval_every": 2, "max_steps": 4, **changes}
    return toy_config(toy, output_dir=out, **settings)


def _train(config: PreferenceConfig) -> None:
    train(config)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_a_run_goes_back_with_half_the_rate_and_ends_as_it_began(
    processes: int, toy: Path, tmp_path: Path
) -> None:
    config = guarded(toy, tmp_path)
    run_ranks(_train, config, world_size=processes)

    lines = metrics(tmp_path)
    acted = [line["guard"] for line in lines if "guard" in line]
    assert [(each["step"], each["action"], each["to"]) for each in acted if "to" in each] == [
        (2, "rollback", 0),
        (2, "rollback", 0),
        (2, "stop", 0),
    ]
    learned = [line for line in lines if "grad_norm" in line]
    assert [line["step"] for line in learned] == [1, 2] * 3
    assert [line["lr"] for line in learned[::2]] == [1e-3, 5e-4, 2.5e-4]
    assert learned[0]["loss"] == learned[2]["loss"] == learned[4]["loss"]  # of the same rows
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["eval"]["kl"], result["eval"]["best_step"]) == (0, 0.0, 0)
    assert result["guards"] == [each for each in acted if "to" in each]
