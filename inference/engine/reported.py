"""Log-probabilities for people: of the policy itself, with the likeliest tokens beside.

Dimension names: B rows, V vocabulary.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from inference.engine.requests import Reported


def reported(
    logits: Float[Tensor, "B V"], tokens: Sequence[int], num_top: Sequence[int]
) -> list[Reported]:
    """What the policy says of a token of each row, at temperature 1 and before anything is altered.

    Args:
        logits: of the policy.
        tokens: that follow, one for each row.
        num_top: of how many of the likeliest tokens of each row the log-probabilities are wanted.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = [row[token] for row, token in zip(logprobs, tokens, strict=True)]
    values, ids = logprobs.topk(min(max(num_top, default=0), logits.shape[-1]), dim=-1)
    return [
        Reported(logprob.item(), tuple(zip(of_row[:count], best[:count], strict=True)))
        for logprob, of_row, best, count in zip(
            chosen, ids.tolist(), values.tolist(), num_top, strict=True
        )
    ]
