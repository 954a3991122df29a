"""Generation: token ids in, token ids and their log-probabilities out.

One loop for training, evaluation and chat: prompts padded on the left, a key-value cache, exact
masks and positions. Rows that have ended leave the batch once they fill half of it.
Dimension names: B rows, P tokens so far, T tokens of one forward pass, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from inference.sampling import Sampler
from pipeline.errors import DataError
from pipeline.models.forward import base_model, context_length


@dataclass
class Response:
    """What the model answered to one prompt."""

    ids: list[int] = field(default_factory=list)
    """Sampled tokens, the stop token included."""

    logprobs: list[float] = field(default_factory=list)
    """log pi of each token under the whole, untruncated policy at the sampling temperature (at
    temperature 1 for greedy decoding), in nats."""

    stopped: bool = False
    """True where the model ended its turn itself; False where the length did."""


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: Sequence[int],
    seed: int,
    top_p: float = 1.0,
    keys: Sequence[int] | None = None,
    batch_size: int = 64,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Response]:
    """Answer each prompt, `batch_size` at a time; responses come in the order of the prompts.

    Sampling is keyed by (seed, key of the prompt, position), so it does not depend on the order of
    the prompts or on what shares a batch. A response also ends where the model's context does.

    Args:
        model: a causal language model, plain or with adapters.
        prompts: token ids, none empty.
        max_new_tokens: longest response, its stop token included.
        temperature: divides the logits before sampling; 0 takes the likeliest token.
        stop_ids: tokens that end a response.
        seed: of the sampling.
        top_p: sample only from the likeliest tokens that together reach this probability.
        keys: one number for each prompt; their indices if not given.
        batch_size: rows computed at once.
        on_token: called with (prompt index, token) as tokens come.

    Raises:
        DataError: a prompt is empty or leaves no room in the model's context.
    """
    room = [room_after(base_model(model), len(prompt)) for prompt in prompts]
    keys = range(len(prompts)) if keys is None else keys
    sampler = Sampler(temperature=temperature, top_p=top_p, seed=seed)
    responses = [Response() for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))

    for start in range(0, len(prompts), batch_size):
        batch = Decoding(model, prompts, by_length[start : start + batch_size])
        for position in range(max_new_tokens):
            logits = batch.forward()
            tokens, logprobs = sampler(logits, [keys[row] for row in batch.rows], position)
            running: list[bool] = []
            for row, token, logprob in zip(batch.rows, tokens, logprobs, strict=True):
                response = responses[row]
                if not response.stopped and len(response.ids) < room[row]:
                    response.ids.append(token)
                    response.logprobs.append(logprob)
                    response.stopped = token in stop_ids
                    if on_token is not None:
                        on_token(row, token)
                running.append(not response.stopped and len(response.ids) < room[row])
            if not any(running):
                break
            batch.append(tokens, running)
    return responses


def room_after(model: PreTrainedModel, num_tokens: int) -> int:
    """How many tokens may follow a prompt of `num_tokens` in the model's context.

    Raises:
        DataError: the prompt is empty or leaves no room.
    """
    if num_tokens == 0:
        raise DataError("a prompt has no tokens; give it at least one")
    limit = context_length(model)
    if num_tokens >= limit:
        raise DataError(
            f"a prompt has {num_tokens} tokens and the model reads {limit}; shorten the prompt"
        )
    return limit - num_tokens


class Decoding:
    """A batch in the middle of generation: its rows, its cache, its masks."""

    def __init__(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], rows: Sequence[int]
    ) -> None:
        self.model = model
        self.rows = list(rows)
        """Which prompt each row of the tensors belongs to."""
        self.cache = DynamicCache(config=base_model(model).config)
        device = next(model.parameters()).device
        width = max(len(prompts[row]) for row in rows)
        gaps = [width - len(prompts[row]) for row in rows]
        self.mask: Int[Tensor, "B P"] = torch.tensor(
            [[0] * gap + [1] * (width - gap) for gap in gaps], device=device
        )
        self.inputs: Int[Tensor, "B T"] = torch.tensor(
            [
                [prompts[row][0]] * gap + list(prompts[row])
                for gap, row in zip(gaps, rows, strict=True)
            ],
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
        kept = [slot for slot, runs in enumerate(running) if runs]
        index = torch.tensor(kept, device=self.mask.device)
        self.rows = [self.rows[slot] for slot in kept]
        self.inputs, self.mask = self.inputs[index], self.mask[index]
        self.cache.batch_select_indices(index)
