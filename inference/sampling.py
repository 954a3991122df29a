"""Choosing tokens: counter-based randomness and inverse-transform sampling.

Dimension names: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014): a bijection of 64-bit words."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def uniforms(
    seed: int, keys: Sequence[int], positions: int | Sequence[int]
) -> Float[np.ndarray, " B"]:
    """One number in [0, 1) for each key and position: a pure function of (seed, key, position).

    Nothing is drawn from a stream, so a row's numbers do not depend on the rows beside it.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        state = _mix(np.asarray([seed % 2**64], dtype=np.uint64) + _GOLDEN)
        state = _mix((state ^ np.asarray(keys, dtype=np.uint64)) + _GOLDEN)
        state = _mix((state ^ np.asarray(positions, dtype=np.uint64)) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen."""

    temperature: float
    """Divides the logits; 0 takes the likeliest token."""

    top_p: float
    """Sample only from the likeliest tokens that together reach this probability."""

    seed: int

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return False

    def __call__(
        self,
        logits: Float[Tensor, "B V"],
        keys: Sequence[int],
        positions: int | Sequence[int],
        histories: Sequence[Sequence[int]] = (),
    ) -> tuple[list[int], list[float]]:
        """Tokens, and their log-probabilities under the whole policy at this temperature.

        `positions` counts the tokens of each response so far, `histories` are all tokens of the
        sequences.
        """
        del histories
        logits = logits.float()
        if self.temperature > 0:
            logits = logits / self.temperature
        logprobs = logits.log_softmax(dim=-1)
        if self.temperature == 0:
            tokens = logprobs.argmax(dim=-1)
        else:
            points = torch.from_numpy(uniforms(self.seed, keys, positions)).to(logits.device)
            tokens = inverse_transform(nucleus(logprobs.double().exp(), self.top_p), points)
        chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
        return tokens.tolist(), chosen.tolist()


def nucleus(probabilities: Float[Tensor, "B V"], top_p: float) -> Float[Tensor, "B V"]:
    """Zero all but the likeliest tokens that together reach `top_p` (Holtzman et al. 2020)."""
    if top_p >= 1.0:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered * (before < top_p)
    return torch.zeros_like(probabilities).scatter(-1, order, kept)


def inverse_transform(
    weights: Float[Tensor, "B V"], points: Float[Tensor, " B"]
) -> Int[Tensor, " B"]:
    """The token at share `points` of each row's cumulative weight; never one of weight 0."""
    cumulative = weights.cumsum(dim=-1)
    thresholds = points[:, None] * cumulative[:, -1:]
    return (
        torch.searchsorted(cumulative, thresholds, right=True)
        .squeeze(-1)
        .clamp(max=weights.shape[-1] - 1)
    )
