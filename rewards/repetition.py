"""A price for responses that repeat themselves."""

from itertools import islice

from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.scorer import Scorer, one_by_one


def repetition_scorer(config: RewardConfig) -> Scorer:
    """Minus the share of phrases of `ngram` words that occurred before: 0 to -1.

    As the repetition penalty of Yeo et al. 2025 (arXiv:2502.03373), per response. A response with
    fewer words has no phrase and costs nothing.
    """

    def score(episode: Episode) -> float:
        words = episode.response.lower().split()
        shifted = (islice(words, start, None) for start in range(config.ngram))
        phrases = list(zip(*shifted, strict=False))
        return len(set(phrases)) / len(phrases) - 1.0 if phrases else 0.0

    return one_by_one(score)
