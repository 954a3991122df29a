"""One sentence where PPO goes wrong, once until it recovers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from step3_ppo.alarms import QUIET, Alarms, check_reward_model

SOUND = {
    "kl": 1.0,
    "ratio_max": 1.5,
    "entropy": 0.5,
    "response_length": 10.0,
    "stop_rate": 1.0,
}

WRONG: dict[str, tuple[dict[str, float], str]] = {
    "kl": ({"kl": 2.6}, "the actor is 0.26 nats a token from the reference, beyond 0.25"),
    "ratio": ({"ratio_max": 85.0}, "updates made a token 85 times as likely, beyond 20 times"),
    "collapse": ({"entropy": 0.04}, "entropy went from 0.5 to 0.04 nats a token: answers all"),
    "noise": ({"entropy": 1.6}, "entropy went from 0.5 to 1.6 nats a token: answers become noise"),
    "longer": ({"response_length": 21.0}, "answers went from 10 to 21 tokens"),
    "shorter": ({"response_length": 4.0}, "answers went from 10 to 4 tokens"),
    "stop rate": ({"stop_rate": 0.75}, "75 % of answers end by themselves, against 100 % at first"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_metric_out_of_order_is_one_sentence_until_it_has_recovered(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes, sentence = WRONG[case]
    alarms, wrong = Alarms(), SOUND | changes

    said = [
        len(alarms.look(step, metrics))
        for step, metrics in enumerate(
            [SOUND, wrong, wrong, SOUND, wrong, *[SOUND] * QUIET, wrong, wrong], start=1
        )
    ]

    assert said == [0, 1, 0, 0, 0, *[0] * QUIET, 1, 0]
    messages = [record.getMessage() for record in caplog.records]
    assert all(message.partition(": ")[2].startswith(sentence) for message in messages)
    assert [message.partition(":")[0] for message in messages] == [
        "iteration 2",
        f"iteration {6 + QUIET}",
    ]


@pytest.mark.parametrize(
    ("ended", "scores_ends", "remedy"),
    [
        ({}, True, "raise ppo.max_new_tokens, or lower ppo.missing_eos_score"),
        ({}, False, "raise ppo.max_new_tokens"),
        ({"turns": 0.25, "tokens": 0.0}, False, "raise ppo.max_turns"),
        ({"turns": 0.05, "tokens": 0.2}, False, "raise ppo.max_new_tokens or ppo.max_turns"),
        (
            {"turns": 0.25, "tokens": 0.0},
            True,
            "raise ppo.max_turns, or lower ppo.missing_eos_score",
        ),
        (
            {"turns": 0.0, "tokens": 0.0},
            True,
            "the environment failed in the others; see reward_failures",
        ),
    ],
)
def test_responses_that_no_longer_end_name_what_ends_them(
    ended: dict[str, float], scores_ends: bool, remedy: str
) -> None:
    by_limit = {f"ended_by_{name}": share for name, share in ended.items()}
    alarms = Alarms(scores_ends=scores_ends)
    alarms.look(1, SOUND)

    (sentence,) = alarms.look(2, SOUND | {"stop_rate": 0.75} | by_limit)

    assert sentence.partition(" at first: ")[2] == remedy


def test_what_a_run_that_learns_looks_like_raises_nothing() -> None:
    """The last iteration of the embedded default, after forty."""
    alarms = Alarms()
    alarms.look(1, SOUND | {"entropy": 0.352, "response_length": 11.8, "ratio_max": 3.17})

    last = {"kl": 1.68, "ratio_max": 5.45, "entropy": 0.167, "response_length": 11.9}
    assert alarms.look(40, SOUND | last) == []


def test_a_resumed_run_knows_what_was_said_and_where_it_began() -> None:
    whole = Alarms()
    whole.look(1, SOUND)
    whole.look(2, SOUND | WRONG["kl"][0])
    resumed = Alarms()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))

    for step, name in ((3, "kl"), (4, "collapse"), (5, "shorter")):
        metrics = SOUND | WRONG[name][0]
        assert resumed.look(step, metrics) == whole.look(step, metrics)
    assert resumed.state_dict() == whole.state_dict()


def warned(directory: Path, result: Any, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    (directory / "result.json").write_text(json.dumps(result))
    check_reward_model(str(directory))
    return " ".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


def test_a_reward_model_near_chance_is_named_with_its_figure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(accuracy: float, pairs: int) -> str:
        result = {"eval": {"accuracy_after": accuracy, "pairs": pairs}}
        return warned(tmp_path, result, caplog)

    assert "orders 49.3 % of 150 held-out pairs right, where guessing gives 50 %" in said(
        0.493, 150
    )
    assert "54.0 % of 5000" in said(0.54, 5000)
    assert "60.0 % of 64" in said(0.6, 64)  # guessing gives as much in one of twenty
    assert said(0.6, 1000) == said(0.96, 768) == ""


def test_a_reward_model_without_a_known_accuracy_is_taken_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(tmp_path, {"eval": {}}, caplog) == warned(tmp_path, [], caplog) == ""
    (tmp_path / "result.json").write_text("{")
    check_reward_model(str(tmp_path))
    check_reward_model(str(tmp_path / "missing"))
    check_reward_model(None)
    assert not caplog.records
