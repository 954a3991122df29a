"""The sources that read the response alone or beside a column: exact, regex, length, repetition."""

from dataclasses import fields

import pytest

from pipeline.data.examples import Message
from pipeline.errors import ConfigError
from rewards import config, sources
from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.sources import read_source, scorer_of
from rewards.spec import KINDS


def test_every_kind_has_a_scorer_and_every_setting_its_kinds() -> None:
    settings = {field.name for field in fields(RewardConfig)}

    # A function is loaded from its file; step 3 itself has its reward model and its environment.
    assert set(sources._SCORERS) | {"function", "model", "environment"} == set(KINDS)
    assert set(config._USED_BY) == settings - {"name", "kind", "weight"}
    assert set().union(*config._USED_BY.values()) <= set(KINDS)


def reward(config: RewardConfig, response: str, num_tokens: int = 0, **extra: object) -> object:
    prompt = (Message("user", "?"),)
    episode = Episode(prompt, response, extra=extra, num_tokens=num_tokens)
    (outcome,) = scorer_of(read_source(config)).score([episode])
    assert outcome.failure is None
    return outcome.value


def test_exact_compares_words_and_takes_the_last_match_of_its_pattern() -> None:
    whole = RewardConfig(name="right", kind="exact")
    found = RewardConfig(name="right", kind="exact", pattern=r"Answer: *(\S+)", column="label")

    assert reward(whole, " the  red\nhouse ", answer="the red house") == 1
    assert reward(whole, "the red houses", answer="the red house") == 0
    assert reward(whole, "7", answer=7) == 1
    assert reward(whole, "the red house") is None
    assert reward(found, "Answer: A\nno:\nAnswer: B", label="B") == 1
    assert reward(found, "B", label="B") == 0


def test_a_regex_is_searched_over_all_lines() -> None:
    config = RewardConfig(name="form", kind="regex", pattern="^<think>.*</think>")

    assert reward(config, "<think>a\nb</think> 5") == 1
    assert reward(config, "5 <think>a</think>") == 0


def test_a_long_response_costs_up_to_1_in_proportion() -> None:
    config = RewardConfig(name="short", kind="length", max_tokens=100, buffer_tokens=20)
    at_once = RewardConfig(name="short", kind="length", max_tokens=100)

    costs = [reward(config, "", num_tokens=count) for count in (0, 100, 105, 120, 500)]

    assert costs == [0, 0, -0.25, -1, -1]
    assert [reward(at_once, "", num_tokens=count) for count in (100, 101)] == [0, -1]


def test_repeated_phrases_cost_their_share() -> None:
    config = RewardConfig(name="fresh", kind="repetition", ngram=2)

    assert reward(config, "one two three four") == 0
    # a b, b a, a b, b a: two of four are new.
    assert reward(config, "a b A b a") == -0.5
    assert reward(config, "word") == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "regex"}, "rewards.it.pattern is missing"),
        ({"kind": "function"}, "rewards.it.path is missing"),
        ({"kind": "length"}, "rewards.it.max_tokens is missing"),
        ({"kind": "math", "pattern": "x"}, "math does not read it"),
        ({"kind": "length", "max_tokens": 5, "buffer_tokens": -1}, "buffer_tokens must be 0 or"),
        ({"kind": "repetition", "ngram": 0}, "ngram must be 1 or more"),
        ({"kind": "math", "weight": float("nan")}, "weight must be finite"),
        ({"kind": "json_schema", "path": "a", "column": "b"}, "from one of them"),
        ({"kind": "math", "name": "a b"}, "must be letters, digits and _"),
    ],
)
def test_settings_that_can_not_be_meant_are_refused(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        RewardConfig(**{"name": "it", **settings})  # type: ignore[arg-type]
