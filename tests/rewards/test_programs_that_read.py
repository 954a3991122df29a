"""The sources that read the response alone or with a column: exact, regex, length."""

from typing import get_args

import pytest

from pipeline.data.examples import Message
from pipeline.settings.fields import list_settings
from rewards.config import KINDS, Kind, RewardConfig
from rewards.contract import Episode
from rewards.sources import _VERIFIERS, make_scorer, read_source
from tests.sources import ROOT


def reward(config: RewardConfig, response: str, num_tokens: int = 0, **extra: object) -> object:
    prompt = (Message("user", "?"),)
    episode = Episode(prompt, response, extra=extra, num_tokens=num_tokens)
    (outcome,) = make_scorer(read_source(config))([episode])
    assert outcome.failure is None
    return outcome.value


def test_exact_compares_words_of_the_last_match_of_its_pattern() -> None:
    full = RewardConfig(name="right", kind="exact")
    matched = RewardConfig(name="right", kind="exact", pattern=r"Answer: *(\S+)", column="label")

    assert reward(full, " the  red\nhouse ", answer="the red house") == 1
    assert reward(full, "the red houses", answer="the red house") == 0
    assert reward(full, "7", answer=7) == reward(full, "7", answer=["7"]) == 1
    with pytest.raises(TypeError, match=r"the row's answer .* got dict {'a': 7}; use another"):
        reward(full, "7", answer={"a": 7})
    assert reward(full, "the red house") is None
    assert reward(matched, "Answer: A\nno:\nAnswer: B", label="B") == 1
    assert reward(matched, "B", label="B") == 0


def test_regex_matches_across_lines() -> None:
    config = RewardConfig(name="form", kind="regex", pattern="^<think>.*</think>")

    assert reward(config, "<think>a\nb</think> 5") == 1
    assert reward(config, "5 <think>a</think>") == 0


def test_length_penalty_grows_linearly_to_1() -> None:
    config = RewardConfig(name="short", kind="length", max_tokens=100, buffer_tokens=20)
    no_buffer = RewardConfig(name="short", kind="length", max_tokens=100)

    penalties = [reward(config, "", num_tokens=count) for count in (0, 100, 105, 120, 500)]

    assert penalties == [0, 0, -0.25, -1, -1]
    assert [reward(no_buffer, "", num_tokens=count) for count in (100, 101)] == [0, -1]


def test_every_kind_has_settings_a_scorer_and_documentation() -> None:
    others = {"model", "environment", "function", "remote", "judge"}
    assert set(get_args(Kind)) == set(KINDS) == others | set(_VERIFIERS)
    page = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    (help_text,) = [s.description for s in list_settings(RewardConfig) if s.name == "kind"]
    assert not [k for k in KINDS if f"\n| `{k}` |" not in page or k not in help_text]
