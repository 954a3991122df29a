"""Generation for models whose attention is their own: left-padded batches, one after the other.

Used where `inference/batching.py` can't be: layers with convolutions or a recurrent state, ALiBi,
soft-capping. Exact masks and positions; rows that have ended leave the batch once they fill half of
it. Dimension names: B rows, P tokens so far, T tokens of one forward pass, V vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from inference.requests import Recorder, Request
from inference.sampling import Sampler
from pipeline.models.forward import base_model

SORTED = 8
"""Batches whose requests are sorted by length together; more pad less, and keep more waiting."""


def answer_in_batches(
    model: nn.Module,
    requests: Sequence[Request],
    sampler: Sampler,
    recorder: Recorder,
    *,
    batch_size: int,
) -> Iterator[Request]:
    """Answer `batch_size` requests at a time; those of a batch come when all of them have ended."""
    for asked in batches_of(requests, batch_size):
        batch = PaddedBatch(model, asked)
        ended: set[int] = set()
        while len(ended) < len(asked):
            logits = batch.forward()
            rows = batch.requests
            # Rows that ended and are still in the batch choose tokens that go nowhere.
            positions = [len(row.response.ids) for row in rows]
            tokens, logprobs = sampler(
                logits, [row.key for row in rows], positions, [row.tokens for row in rows]
            )
            for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
                if row.index not in ended and not recorder.add(row, token, logprob):
                    ended.add(row.index)
            if len(ended) < len(asked):
                batch.append(tokens, [row.index not in ended for row in rows])
        yield from asked


def batches_of(requests: Sequence[Request], batch_size: int) -> Iterator[list[Request]]:
    """Batches of prompts of similar length, from among SORTED batches at a time."""
    for start in range(0, len(requests), SORTED * batch_size):
        among = requests[start : start + SORTED * batch_size]
        by_length = sorted(among, key=lambda request: len(request.prompt))
        for first in range(0, len(among), batch_size):
            yield by_length[first : first + batch_size]


class PaddedBatch:
    """A batch in the middle of generation: its rows, its cache, its masks."""

    def __init__(self, model: nn.Module, requests: Sequence[Request]) -> None:
        self.model = model
        self.requests = list(requests)
        """Which request each row of the tensors belongs to."""
        self.cache = DynamicCache(config=base_model(model).config)
        device = next(model.parameters()).device
        prompts = [request.prompt for request in requests]
        width = max(len(prompt) for prompt in prompts)
        gaps = [width - len(prompt) for prompt in prompts]
        self.mask: Int[Tensor, "B P"] = torch.tensor(
            [[0] * gap + [1] * (width - gap) for gap in gaps], device=device
        )
        self.inputs: Int[Tensor, "B T"] = torch.tensor(
            [[prompt[0]] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)],
            device=device,
        )

    @torch.no_grad()
    def forward(self) -> Float[Tensor, "B V"]:
        """Logits of the next token of each row."""
        positions = (self.mask.cumsum(dim=-1) - 1).clamp(min=0)
        output = self.model(
            input_ids=self.inputs,
            attention_mask=self.mask,
            position_ids=positions[:, -self.inputs.shape[1] :],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def append(self, tokens: Sequence[int], running: Sequence[bool]) -> None:
        """Feed the chosen tokens next; drop ended rows once they fill half the batch."""
        self.inputs = torch.tensor(tokens, device=self.mask.device)[:, None]
        # The tokens of ended rows stay out of sight, so that their positions never grow past the
        # model's context while other rows go on.
        self.mask = torch.cat([self.mask, self.mask.new_tensor(running)[:, None]], dim=-1)
        if sum(running) * 2 > len(running):
            return
        kept = [row for row, runs in enumerate(running) if runs]
        index = torch.tensor(kept, device=self.mask.device)
        self.requests = [self.requests[row] for row in kept]
        self.inputs, self.mask = self.inputs[index], self.mask[index]
        self.cache.batch_select_indices(index)
