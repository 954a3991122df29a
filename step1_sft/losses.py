"""Next-token loss on trained tokens."""

from jaxtyping import Float
from torch import Tensor


def next_token_nll(logprobs: Float[Tensor, " K"]) -> Float[Tensor, ""]:
    """Summed negative log-likelihood of K target tokens, in nats.

    A sum, not a mean: the caller divides by the token count of the whole optimizer step, so that
    micro-batches and processes of unequal length weigh every token the same.
    """
    return -logprobs.sum()
