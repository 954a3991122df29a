"""A greedy response by transformers, which other runtimes are compared with."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.models.forward import cache_name


def greedy_tokens(model: PreTrainedModel, prompt: Int[Tensor, " P"], count: int) -> list[int]:
    """The `count` tokens that a model finds likeliest after a prompt, one by one; none ends it."""
    return greedy_with_margins(model, prompt, count)[0]


@torch.no_grad()
def greedy_with_margins(
    model: PreTrainedModel, prompt: Int[Tensor, " P"], count: int
) -> tuple[list[int], list[float]]:
    """The tokens of `greedy`, and how far each one's logit is above the second.

    In units of the largest magnitude of a logit there.
    """
    ids, past, found, margins = prompt[None], None, [], []
    name = cache_name(model)
    for _ in range(count):
        result = model(input_ids=ids, use_cache=True, **{name: past})
        past = result[name]
        logits = result.logits[0, -1]
        first, second = logits.topk(2).values
        margins.append(float((first - second) / logits.abs().max()))
        ids = logits.argmax()[None, None]
        found.append(int(ids))
    return found, margins


def equal_before_a_tie(
    expected: Sequence[int], margins: Sequence[float], found: Sequence[int], *, tie: float
) -> int | None:
    """How many tokens agree until the end, or until rounding decides between two logits.

    None where tokens differ whose logits are further apart than `tie`.
    """
    for place, (token, margin, other) in enumerate(zip(expected, margins, found, strict=True)):
        if token != other:
            return place if margin <= tie else None
    return len(expected)
