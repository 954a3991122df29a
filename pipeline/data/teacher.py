"""A teacher's most likely tokens, in a separate module because NumPy is slow to import."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class TeacherTokens:
    """The T tokens of a teacher's response, and its K most likely tokens at each position."""

    ids: Int[np.ndarray, " T"]
    top_ids: Int[np.ndarray, "T K"]
    top_logprobs: Float[np.ndarray, "T K"]
    """Log-probabilities at temperature 1, in nats."""

    ended: bool
    """Whether the last token ends the response."""

    def __post_init__(self) -> None:
        shape, order = self.top_ids.shape, np.sort(self.top_ids)
        if (
            not self.ids.shape + shape[-1:] == shape == self.top_logprobs.shape
            or min(self.ids.min(), order.min()) < 0
            or not np.diff(order).all()
            or not np.isfinite(self.top_logprobs).all()
            or np.exp(self.top_logprobs).sum(axis=1).max() > 1.001
        ):
            raise ValueError("invalid token ids or log-probabilities")
