"""Guards report an unhealthy signal once until it recovers."""

from typing import Any

import pytest

from pipeline.config import LoraConfig, TrainedModelConfig
from pipeline.guards.guards import COOLDOWN, Guards
from pipeline.system.errors import ConfigError
from step3_ppo.config import PPOConfig
from step3_ppo.guard_settings import DEFAULT_GUARDS, GuardConfig
from step3_ppo.guards import RLSignals, diverges

HEALTHY = {
    "kl": 1.0,
    "ratio_max": 1.5,
    "entropy": 0.5,
    "response_length": 10.0,
    "stop_rate": 1.0,
    "repetition": 0.02,
    "explained_variance": 0.4,
    "skipped": 0.0,
    "dead_groups": 0.2,
    "reward_failures": 0.0,
    "rollout_gap": 1e-5,
}

UNHEALTHY: dict[str, tuple[dict[str, float], str]] = {
    "kl_per_token>0.25": ({"kl": 2.6}, "the KL to the reference is 0.26 nats per token, above"),
    "ratio_max>20": ({"ratio_max": 85.0}, "the largest policy ratio is 85, above 20"),
    "entropy<0.2": (
        {"entropy": 0.09},
        "entropy went from 0.5 to 0.09 nats per token: responses are becoming alike",
    ),
    "entropy>3": (
        {"entropy": 1.6},
        "entropy went from 0.5 to 1.6 nats per token: responses are becoming random",
    ),
    "response_length>3": ({"response_length": 31.0}, "responses went from 10 to 31 tokens"),
    "response_length<0.5": ({"response_length": 4.0}, "responses went from 10 to 4 tokens"),
    "stop_rate>0.2": ({"stop_rate": 0.75}, "75% of responses end before the limit, compared"),
    "repetition>0.3": ({"repetition": 0.4}, "40% of tokens repeat a phrase of their response"),
    "explained_variance<0": ({"explained_variance": -0.5}, "the critic explains -0.50 of the"),
}


WINDOWS = {"kl_per_token>0.25": 1, "ratio_max>20": 1, "explained_variance<0": 5}
"""Consecutive iterations beyond the limit that a default guard needs; 3 for all others."""


def check_messages(guards: Guards, step: int, metrics: dict[str, float]) -> list[str]:
    return [trip.sentence for trip in guards.check(step, metrics)]


def test_message_with_adapters_names_their_learning_rate() -> None:
    rate, _ = TrainedModelConfig(path="base", lora=LoraConfig()).peak_lr
    guards = Guards(DEFAULT_GUARDS, RLSignals(rate=rate, critic_rate="optim.lr"))

    (message,) = check_messages(guards, 1, HEALTHY | UNHEALTHY["kl_per_token>0.25"][0])

    assert message.endswith("lower ppo.actor.lora.lr")


@pytest.mark.parametrize("name", UNHEALTHY)
def test_unhealthy_signal_is_reported_once_until_it_recovers(name: str) -> None:
    changes, message = UNHEALTHY[name]
    guards, bad = Guards(DEFAULT_GUARDS, RLSignals()), HEALTHY | changes
    window = WINDOWS.get(name, 3)
    history = [HEALTHY, *[bad] * (window - 1), HEALTHY, *[bad] * (window + 1)]
    history += [*[HEALTHY] * COOLDOWN, *[bad] * window]

    by_step = [
        check_messages(guards, step, metrics) for step, metrics in enumerate(history, start=1)
    ]

    assert [step for step, sent in enumerate(by_step) if sent] == [2 * window, len(history) - 1]
    assert all(text.startswith(message) for sent in by_step for text in sent)


def test_stop_rate_within_its_error_trips_no_guard() -> None:
    signals, rollout = RLSignals(responses=8), {**HEALTHY, "stop_rate": 6 / 8}

    assert signals.compute_value("stop_rate", rollout, HEALTHY) == 0  # error 0.15
    assert signals.compute_value("stop_rate", {**HEALTHY, "stop_rate": 0.5}, HEALTHY) == 0.5


OR_LOWER_EOS_SCORE = ", or lower ppo.missing_eos_score"


@pytest.mark.parametrize(
    ("ended", "has_eos_penalty", "remedy"),
    [
        ({}, True, f"raise ppo.max_new_tokens{OR_LOWER_EOS_SCORE}"),
        ({}, False, "raise ppo.max_new_tokens"),
        ({"turns": 0.25, "tokens": 0.0}, False, "raise ppo.max_turns"),
        ({"turns": 0.05, "tokens": 0.2}, False, "raise ppo.max_new_tokens or ppo.max_turns"),
        ({"turns": 0.25, "tokens": 0.0}, True, f"raise ppo.max_turns{OR_LOWER_EOS_SCORE}"),
        (
            {"turns": 0.0, "tokens": 0.0},
            True,
            "the environment failed in the other episodes; see reward_failures",
        ),
    ],
)
def test_stop_rate_message_names_the_limiting_setting(
    ended: dict[str, float], has_eos_penalty: bool, remedy: str
) -> None:
    by_limit = {f"ended_by_{name}": share for name, share in ended.items()}
    guard = GuardConfig(signal="stop_rate", limit=0.2, window=1)
    guards = Guards([guard], RLSignals(has_eos_penalty=has_eos_penalty))
    guards.check(1, HEALTHY)

    (message,) = check_messages(guards, 2, HEALTHY | {"stop_rate": 0.75} | by_limit)

    assert message.partition(" 100% initially: ")[2] == remedy


def make_metrics(score: float, gold: float, stderr: float = 0.01) -> dict[str, float]:
    return {"score": score, "score_stderr": stderr, "gold": gold, "gold_stderr": stderr}


def test_divergence_is_rising_reward_with_falling_gold() -> None:
    def is_divergent(scores: list[float], golds: list[float], **changes: Any) -> bool:
        history = [make_metrics(s, g, **changes) for s, g in zip(scores, golds, strict=True)]
        return diverges(history, errors=2.0)

    up, down = [0.5, 0.6, 0.7], [0.5, 0.4, 0.3]
    assert is_divergent(up, down)
    assert not is_divergent(up, up)
    assert not is_divergent(down, down)
    assert not is_divergent(up, down, stderr=0.08)  # 0.2 is less than two standard errors of 0.113
    partial = [make_metrics(0.5, 0.5), {"score": 0.6, "score_stderr": 0.01}, make_metrics(0.7, 0.3)]
    assert not diverges(partial, errors=2.0)


def test_guard_requires_what_it_measures() -> None:
    guard = GuardConfig(signal="explained_variance", limit=0.5, window=1)
    assert guard in PPOConfig(guards=(guard,)).guards
    with pytest.raises(ConfigError, match="a critic, which this method lacks"):
        PPOConfig(guards=(guard,), advantage="rloo", group_size=2)
    guard = GuardConfig(signal="dead_groups", limit=0.5, window=1)
    with pytest.raises(ConfigError, match="group_size of 2 or more"):
        PPOConfig(guards=(guard,), group_size=1)
