"""Verifiers: exact matches, patterns, the length penalty, and the embedded task."""

import re

from pipeline.demo.task import verdict
from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode, Scorer, per_episode_scorer, single_answer


def exact_scorer(config: RewardConfig) -> Scorer:
    """Return a scorer that gives 1 if the response equals the answer except for whitespace, else 0.

    With a pattern, the first group of its last match is compared instead of the whole response; a
    response without a match gets 0. A row without an answer has no reward.
    """
    pattern = compile_pattern(config) if config.pattern else None

    def score(episode: Episode) -> float | None:
        answer = single_answer(episode.extra.get(config.resolved_column))
        if answer is None:
            return None
        text = episode.response
        if pattern is not None:
            matches = list(pattern.finditer(text))
            if not matches:
                return 0.0
            text = matches[-1][1 if pattern.groups else 0] or ""
        return float(text.split() == str(answer).split())

    return per_episode_scorer(score)


def regex_scorer(config: RewardConfig) -> Scorer:
    """Return a scorer that gives 1 if the pattern is found, else 0; `.` also matches newlines."""
    pattern = compile_pattern(config)
    return per_episode_scorer(lambda episode: float(pattern.search(episode.response) is not None))


def compile_pattern(config: RewardConfig) -> re.Pattern[str]:
    """Compile the pattern of the settings; raise ConfigError if it is invalid."""
    try:
        return re.compile(config.pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"rewards.{config.name}.pattern is not a regular expression: {error}"
        ) from None


def length_scorer(config: RewardConfig) -> Scorer:
    """Return a scorer that gives 0 up to `max_tokens`, then falls to -1 over `buffer_tokens`.

    This is DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), where L_max
    is max_tokens + buffer_tokens and L_cache is buffer_tokens.
    """
    max_tokens, buffer = config.max_tokens or 0, config.buffer_tokens

    def score(episode: Episode) -> float:
        excess = episode.num_tokens - max_tokens
        if excess <= 0:
            return 0.0
        return -1.0 if excess >= buffer else -excess / buffer

    return per_episode_scorer(score)


def verifier_scorer(config: RewardConfig) -> Scorer:
    """Return a scorer: 1 for a correct and polite response, else 0; None if a row has no answer."""

    def score(episode: Episode) -> float | None:
        answer = episode.extra.get(config.resolved_column)
        if not isinstance(answer, str):
            return None
        return float(verdict("", answer, episode.response).both)

    return per_episode_scorer(score)
