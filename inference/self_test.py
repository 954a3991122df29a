"""Does generation say what the model says? Asked once, before a run relies on it."""

from collections.abc import Sequence

import torch
from torch import nn

from inference.generation import generate
from pipeline.models.forward import base_model

NEW_TOKENS = 8
TOLERANCE = 16
"""Rounding steps of the largest logit that two likeliest tokens may lie apart: the engine and a
plain forward pass add in different orders."""


class GenerationMismatchError(RuntimeError):
    """Generation doesn't choose the tokens that the model finds likeliest."""


@torch.no_grad()
def check_generation(model: nn.Module, prompts: Sequence[Sequence[int]]) -> None:
    """Compare greedy responses with plain forward passes, without a cache or other sequences.

    Raises:
        GenerationMismatchError: a token is not among the likeliest.
    """
    device = next(model.parameters()).device
    repeated = [*prompts, *prompts[:1]]  # the last one is copied from the first, not read
    responses = generate(
        model,
        repeated,
        max_new_tokens=NEW_TOKENS,
        temperature=0.0,
        stop_ids=(),
        seed=0,
        batch_size=max(1, len(repeated) - 1),  # the last one waits for a slot
    )
    for prompt, response in zip(repeated, responses, strict=True):
        tokens = torch.tensor([[*prompt, *response.ids]], device=device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        step = torch.finfo(logits.dtype).eps * float(logits.abs().max())
        chosen = logits.gather(-1, tokens[0, len(prompt) :, None]).squeeze(-1).float()
        behind = (logits.amax(dim=-1).float() - chosen).max().item()
        if not behind <= TOLERANCE * step:
            raise GenerationMismatchError(
                f"generation with {base_model(model).config.model_type} in {logits.dtype} chose a"
                f" token whose logit is {behind:.2g} below the likeliest in a plain forward pass:"
                " its responses would not be the model's; please report the model"
            )
