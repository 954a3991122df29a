"""Drawing the next token of each sequence from its logits: the definition.

Dimension names: B sequences, V vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How a token is drawn; tokens are cut off in the order of the settings here."""

    seed: int

    temperature: float
    """Divides the logits; 0 takes the likeliest token, the first of several."""

    top_k: int | None = None
    """Keep that many of the likeliest tokens, and those as likely as the last of them."""

    top_p: float = 1.0
    """Keep the fewest likeliest tokens that together have this share of what is left (Holtzman et
    al. 2020); of tokens that are as likely, those with the lower ids."""

    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest."""


def sample(
    logits: Float[Tensor, "B V"],
    keys: Int[Tensor, " B"],
    positions: Int[Tensor, " B"],
    draw: Draw,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Token ids, and their log-probabilities before any was cut off, fp32.

    The token of a row is the one where the cumulative weight of those kept, in the order of their
    ids, passes the share `uniforms(seed, key, position)` of all of it. Computed in float64. Of a
    row with a logit that is NaN or infinity the log-probability is NaN.
    """
    scores = logits.double() / (draw.temperature or 1.0)
    logprobs = scores.log_softmax(dim=-1)
    if draw.temperature == 0:
        ids = torch.arange(scores.shape[-1], device=scores.device)
        is_highest = scores == scores.amax(dim=-1, keepdim=True)
        tokens = torch.where(is_highest, ids, len(ids) - 1).amin(dim=-1)
    else:
        cumulative = kept(logprobs.exp(), draw).cumsum(dim=-1)
        points = uniforms(draw.seed, keys, positions)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
        tokens = tokens.clamp(max=scores.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1).float()


def kept(weights: Float[Tensor, "B V"], draw: Draw) -> Float[Tensor, "B V"]:
    """The weights of tokens that may be drawn, 0 of the others."""
    if draw.top_k is not None:
        least = weights.topk(min(draw.top_k, weights.shape[-1]), dim=-1).values[:, -1:]
        weights = weights * (weights >= least)
    if draw.top_p < 1:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered * (before < draw.top_p * ordered.sum(dim=-1, keepdim=True))
        weights = torch.zeros_like(weights).scatter(-1, order, ordered)
    return weights * (weights >= draw.min_p * weights.amax(dim=-1, keepdim=True))


def uniforms(
    seed: int, keys: Int[Tensor, " B"], positions: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """One number in [0, 1) for each key and position: a pure function of (seed, key, position).

    Nothing is drawn from a stream, so a row's numbers do not depend on the rows beside it. Three
    rounds of SplitMix64 (Steele et al. 2014), whose words of 64 bits are int64 here.
    """
    state = _mix(_add_golden(torch.zeros_like(keys) + _signed(seed)))
    state = _mix(_add_golden(state ^ keys))
    state = _mix(_add_golden(state ^ positions))
    return _shifted(state, 11).double() * 2.0**-53


def _mix(state: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The finalizer of SplitMix64: a bijection of 64-bit words."""
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _add_golden(state: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    return state + _signed(GOLDEN)


def _shifted(state: Int[Tensor, " B"], bits: int) -> Int[Tensor, " B"]:
    """The state shifted to the right, zeros coming in."""
    return (state >> bits) & (2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    """A word of 64 bits as int64 has it."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word
