"""What changes logits before a token is chosen. Dimension names: B rows, V vocabulary."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def penalized(
    logits: Float[Tensor, "B V"], histories: Sequence[Sequence[int]], penalty: float
) -> Float[Tensor, "B V"]:
    """Lower the logits of tokens that a sequence has already (Keskar et al. 2019, 4.1).

    Those above 0 are divided by `penalty`, those below are multiplied.
    """
    rows = [row for row, history in enumerate(histories) for _ in history]
    tokens = [token for history in histories for token in history]
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    seen[rows, tokens] = True
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def counted(
    logits: Float[Tensor, "B V"],
    responses: Sequence[Sequence[int]],
    *,
    presence: float,
    frequency: float,
) -> Float[Tensor, "B V"]:
    """Lower the logits of tokens that a response has, as OpenAI's API defines its two penalties.

    Of a token that it has c times, `presence + c * frequency` is taken off; prompts don't count.
    """
    rows = [row for row, response in enumerate(responses) for _ in response]
    tokens = [token for response in responses for token in response]
    counts = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    places = torch.tensor([rows, tokens], dtype=torch.long, device=logits.device)
    ones = torch.ones(len(rows), dtype=logits.dtype, device=logits.device)
    counts.index_put_((places[0], places[1]), ones, accumulate=True)
    return logits - frequency * counts - presence * (counts > 0)


def biased(logits: Float[Tensor, "B V"], bias: Sequence[tuple[int, float]]) -> Float[Tensor, "B V"]:
    """Add to the logits of some tokens."""
    tokens = torch.tensor([token for token, _ in bias], device=logits.device)
    values = torch.tensor([value for _, value in bias], dtype=logits.dtype, device=logits.device)
    return logits.index_add(1, tokens, values.expand(len(logits), -1))
