"""Verifiers: matches, patterns, length penalty, the demo task."""

import re

from pipeline.demo.task import verdict
from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode, Scorer, one_by_one, single_answer


def exact_scorer(config: RewardConfig) -> Scorer:
    """1 if the response is the answer, ignoring whitespace, else 0.

    With a pattern, the first group of its last match is compared instead of the whole response; a
    response without a match is wrong. A row without an answer has no reward.
    """
    pattern = compiled(config) if config.pattern else None
    column = config.reads_column

    def score(episode: Episode) -> float | None:
        answer = single_answer(episode.extra.get(column or ""))
        if answer is None:
            return None
        given = episode.response
        if pattern is not None:
            matches = list(pattern.finditer(given))
            if not matches:
                return 0.0
            given = matches[-1][1 if pattern.groups else 0] or ""
        return float(given.split() == str(answer).split())

    return one_by_one(score)


def regex_scorer(config: RewardConfig) -> Scorer:
    """1 if the pattern is found in the response, else 0; `.` also matches newlines."""
    pattern = compiled(config)
    return one_by_one(lambda episode: float(pattern.search(episode.response) is not None))


def compiled(config: RewardConfig) -> re.Pattern[str]:
    """The compiled pattern of the settings; raises ConfigError if it is invalid."""
    try:
        return re.compile(config.pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"rewards.{config.name}.pattern is not a regular expression: {error}"
        ) from None


def length_scorer(config: RewardConfig) -> Scorer:
    """0 up to `max_tokens`, falling linearly to -1 over the next `buffer_tokens`.

    DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), whose L_max is
    max_tokens + buffer_tokens and whose L_cache is buffer_tokens.
    """
    free, buffer = config.max_tokens or 0, config.buffer_tokens

    def score(episode: Episode) -> float:
        over = episode.num_tokens - free
        if over <= 0:
            return 0.0
        return -1.0 if over >= buffer else -over / buffer

    return one_by_one(score)


def verifier_scorer(config: RewardConfig) -> Scorer:
    """1 for a response that is correct and polite, else 0; None if the row has no answer."""
    column = config.reads_column
    assert column is not None

    def score(episode: Episode) -> float | None:
        right = episode.extra.get(column)
        if not isinstance(right, str):
            return None
        return float(verdict("", right, episode.response).both)

    return one_by_one(score)
