"""Log-probabilities and entropy of given tokens: all at once, in tiles, or a few rows at a time.

See `definition.py` for the dimension names. It is plain PyTorch, and needs no compiler.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels.logprobs import definition
from pipeline.kernels.logprobs.divided import Words, divided_logprobs
from pipeline.kernels.logprobs.rows import RowLogprobs
from pipeline.kernels.logprobs.tiles import FusedGradLogprobs, RecomputeLogprobs

TILE = {"cpu": 2**23, "cuda": 2**26}
"""Logits of a tile of tokens, by device: 32 and 256 MiB of fp32. Smaller ones add to the matrix's
gradient more often; larger ones make no product faster."""

VOCABULARY_TILE = {"cpu": 2**21, "cuda": TILE["cuda"]}
"""Logits of a tile of the vocabulary: 8 MiB of fp32 stay in the last cache of a CPU."""

WHOLE = 2**26
"""Up to that many logits, 256 MiB of fp32, all are computed at once, as the plain way does."""

ROWS = {"cpu": 2**20, "cuda": TILE["cuda"]}
"""Logits of the rows of one turn, by device: 4 and 256 MiB of fp32."""


def linear_logprobs(
    hidden: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " K"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_learns: bool = True,
    uniform: bool = False,
    tile: int | None = None,
    words: Words | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probability of each target under softmax(hidden @ weight.T + bias), and the entropy.

    Args:
        hidden: what predicts each target, in the number format of the weights.
        weight: the output matrix.
        bias: of the output, or None.
        targets: token ids.
        temperature: divides the logits.
        entropy: whether the entropy of each distribution is asked for.
        entropy_learns: whether a loss will count it; it decides about memory.
        uniform: whether the loss will weigh all log-probabilities the same; it decides about speed.
        tile: logits of a tile; by default `TILE` or `VOCABULARY_TILE` of them, and a single one up
            to `WHOLE`.
        words: where other processes have the rows of other words, which these are.

    Returns:
        Log-probabilities and entropies in nats, fp32; None for an entropy that nobody asked for.
        The logits are rounded to the weights' number format, as a model's own are; what follows is
        fp32. Of one tile the result is the definition's bit for bit; with several, sums are rounded
        in another order.
    """
    of_words = tile or VOCABULARY_TILE.get(weight.device.type, VOCABULARY_TILE["cpu"])
    if words is not None and len(targets) > 0:
        inputs = (hidden, weight, bias, targets, words)
        return divided_logprobs(*inputs, temperature=temperature, entropy=entropy, tile=of_words)
    if len(targets) * len(weight) <= (WHOLE if tile is None else tile):
        return definition.linear_logprobs(
            hidden,
            weight,
            bias,
            targets,
            temperature=temperature,
            entropy=entropy,
            entropy_learns=entropy_learns,
        )
    matrix_learns = weight.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and not entropy and (uniform or not matrix_learns):
        tile = tile or TILE.get(weight.device.type, TILE["cpu"])
        return FusedGradLogprobs.apply(hidden, weight, bias, targets, temperature, tile), None
    return RecomputeLogprobs.apply(hidden, weight, bias, targets, temperature, of_words, entropy)


def row_logprobs(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, " K"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    at_once: int | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probability of each target under softmax(logits), and the entropy.

    Args:
        logits: of any number format; they must stay as they are until the backward pass.
        targets: token ids.
        temperature: divides the logits.
        entropy: whether the entropy of each distribution is asked for; it has no graph.
        at_once: logits of the rows of one turn, two rows at least; by default `ROWS` of them.

    Returns:
        Log-probabilities and entropies in nats, fp32; None for an entropy that nobody asked for.
    """
    at_once = at_once or ROWS.get(logits.device.type, ROWS["cpu"])
    return RowLogprobs.apply(logits, targets, temperature, entropy, at_once)
