"""Responses that equal an answer, or contain a pattern."""

import re

from pipeline.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.scorer import Scorer, one_by_one


def exact_scorer(config: RewardConfig) -> Scorer:
    """1 if the response is the answer, but for space around and between words, else 0.

    With a pattern its first group, at its last match, is compared instead of the whole response;
    where it doesn't match the response is wrong. A row without an answer has no reward.
    """
    pattern = compiled(config) if config.pattern else None
    column = config.reads_column

    def score(episode: Episode) -> float | None:
        answer = episode.extra.get(column or "")
        if answer is None:
            return None
        given = episode.response
        if pattern is not None:
            matches = list(pattern.finditer(given))
            if not matches:
                return 0.0
            given = matches[-1][1 if pattern.groups else 0] or ""
        return float(_words(given) == _words(str(answer)))

    return one_by_one(score)


def regex_scorer(config: RewardConfig) -> Scorer:
    """1 if the pattern is found in the response, else 0; `.` matches line ends too."""
    pattern = compiled(config)
    return one_by_one(lambda episode: float(pattern.search(episode.response) is not None))


def compiled(config: RewardConfig) -> re.Pattern[str]:
    """The pattern of the settings; a `ConfigError` says what is wrong with it."""
    try:
        return re.compile(config.pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"rewards.{config.name}.pattern is not a regular expression: {error}"
        ) from None


def _words(text: str) -> list[str]:
    return text.split()
