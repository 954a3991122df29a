"""Generation for a list of prompts: token ids in, token ids and their log-probabilities out.

One engine for training, evaluation and chat, on the modules and the attention that training uses.
"""

from collections.abc import Iterator, Sequence

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from inference.engine.batch import OpenBatch
from inference.engine.cache import slot_bytes
from inference.engine.exchange import Exchange, SamePrompts
from inference.engine.replay import PassCounts
from inference.engine.requests import Finished, OnToken, Request, Response, StopWhen, Token
from inference.engine.sampling import Sampler
from inference.tp_group import sharing_of, tp_group_of
from pipeline.errors import ConfigError, DataError
from pipeline.models.forward import base_model, context_length
from pipeline.parallel.mesh import current_mesh

__all__ = ["Response", "generate", "generate_each"]


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
    on_token: OnToken | None = None,
) -> list[Response]:
    """Respond to each prompt; responses are in the order of the prompts.

    Sampling is keyed by (seed, key of the prompt, position), so it does not depend on the order of
    the prompts or on what else is in the batch. A response also ends at the end of the model's
    context.

    Args:
        model: a causal language model, plain or with adapters.
        prompts: token ids, none empty; equal ones are read once.
        max_new_tokens: longest response, its stop token included.
        temperature: divides the logits before sampling; 0 takes the likeliest token.
        stop_ids: tokens that end a response.
        seed: of the sampling.
        top_p: sample only from the likeliest tokens that together reach this probability.
        keys: one number for each prompt; their indices if not given.
        batch_size: sequences computed at once: slots of the key-value cache.
        on_token: called with (prompt index, token) as tokens are generated.

    Raises:
        DataError: a prompt is empty, has ids that the model lacks or fills its context.
    """
    finished = generate_each(
        model,
        prompts,
        Sampler(temperature=temperature, top_p=top_p, seed=seed, stop_ids=tuple(stop_ids)),
        max_new_tokens=max_new_tokens,
        keys=keys,
        batch_size=batch_size,
        on_token=on_token,
    )
    responses = {each.index: each.response for each in finished}
    return [responses[index] for index in range(len(prompts))]


def generate_each(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    keys: Sequence[int] | None = None,
    batch_size: int = 64,
    cache_bytes: int | None = None,
    on_token: OnToken | None = None,
    stop_when: StopWhen | None = None,
    passes: PassCounts | None = None,
) -> Iterator[Finished]:
    """Respond to the prompts like `generate`, yielding each response as it ends.

    Fewer sequences than `batch_size` are computed at once where the keys and values of that many
    don't fit in `cache_bytes` (by default, the free memory). `stop_when` may end responses in
    addition to the sampler's stop tokens and the length. `passes` keeps account of decoding passes.

    If the model is divided among processes, all of them must call this with the same settings, each
    with its own prompts, and exhaust the iterator. Processes with the same prompts each answer some
    of them: `on_token` and `stop_when` are called for these alone.

    Raises:
        DataError: a prompt is empty, has ids that the model lacks or fills its context.
        ConfigError: there is no room for the keys and values of one sequence.
    """
    plain = base_model(model)
    numbers = range(len(prompts)) if keys is None else keys
    same = SamePrompts(sharing_of(plain), len(prompts))
    on_token, stop_when = same.on_token(on_token), same.stop_when(stop_when)
    exchange = Exchange.of(same.own(prompts), same.own(numbers), tp_group_of(plain))
    requests = [
        Request(prompt, sampler, key, min(max_new_tokens, room_after(plain, len(prompt))))
        for prompt, key in exchange.prompts
    ]
    if not requests:
        return same.all(iter(()))
    if cache_bytes is None:
        cache_bytes = free_bytes(next(model.parameters()).device)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    room = slots_within(plain, exchange.smallest(cache_bytes), num_tokens=longest)
    num_slots = min(batch_size, room, len(requests))
    batch = OpenBatch(model, num_slots=num_slots, capacity=longest, passes=passes)
    finished = run_closed(
        batch, requests, exchange.on_token(on_token), exchange.stop_when(stop_when)
    )
    return same.all(exchange.own(finished))


def run_closed(
    batch: OpenBatch,
    requests: Sequence[Request],
    on_token: OnToken | None,
    stop_when: StopWhen | None,
) -> Iterator[Finished]:
    """Submit all requests at once, and yield each response as it ends."""
    indices = {batch.submit(request): index for index, request in enumerate(requests)}
    batch.close()
    while batch.busy:
        for event in batch.step():
            ticket, index = event.ticket, indices[event.ticket]
            if not isinstance(event, Token):
                if event.error is not None:
                    try:
                        raise event.error
                    finally:
                        del event  # else a reference cycle would keep the cache alive
                yield Finished(index, ticket.request.prompt, ticket.response)
                continue
            if on_token is not None:
                on_token(index, event.id)
            if stop_when is not None and not ticket.ended and stop_when(index, ticket.response.ids):
                batch.cancel(ticket)


def slots_within(model: PreTrainedModel, cache_bytes: int, *, num_tokens: int) -> int:
    """The number of sequences of `num_tokens` whose keys and values fit in `cache_bytes`.

    Raises:
        ConfigError: not even one fits.
    """
    needed = slot_bytes(model, num_tokens)
    if needed > cache_bytes:
        raise ConfigError(
            f"the keys and values of one sequence of {num_tokens} tokens take {needed:,} bytes, and"
            f" there is room for {cache_bytes:,}; lower max_new_tokens or shorten the prompts"
        )
    return cache_bytes // needed


def free_bytes(device: torch.device) -> int:
    """Memory that may be used for keys and values.

    Nine tenths of a GPU's free memory, the rest being for activations; on a CPU half of this
    process's share of the available memory, the rest being for activations and the system.
    """
    if device.type != "cuda":
        return psutil.virtual_memory().available // (2 * current_mesh().local_size)
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + cached) * 9 // 10


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
