"""A price for long responses."""

from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.scorer import Scorer, one_by_one


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
