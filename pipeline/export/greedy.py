"""A greedy response by transformers, which other runtimes are compared with."""

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def greedy_tokens(model: PreTrainedModel, prompt: Int[Tensor, " P"], count: int) -> list[int]:
    """The `count` tokens that a model finds likeliest after a prompt, one by one; none ends it."""
    ids, past, found = prompt[None], None, []
    for _ in range(count):
        result = model(input_ids=ids, past_key_values=past, use_cache=True)
        past = result.past_key_values
        ids = result.logits[:, -1:].argmax(dim=-1)
        found.append(int(ids))
    return found
