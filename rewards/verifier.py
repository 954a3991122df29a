"""The verifier of the embedded task as a reward."""

from pipeline.demo.task import verdict
from rewards.config import RewardConfig
from rewards.contract import Episode
from rewards.scorer import Scorer, one_by_one


def verifier_scorer(config: RewardConfig) -> Scorer:
    """1 for a response that is correct and polite, else 0; None where the row has no answer."""
    column = config.reads_column
    assert column is not None

    def score(episode: Episode) -> float | None:
        right = episode.extra.get(column)
        if not isinstance(right, str):
            return None
        return float(verdict("", right, episode.response).both)

    return one_by_one(score)
