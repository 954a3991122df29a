"""Generation for a list of prompts: token ids in, token ids and their log-probabilities out.

Training, evaluation and chat share this engine, which uses training's modules and attention.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from inference.engine.batch import OpenBatch, supports_slots
from inference.engine.cache import count_pages, page_bytes
from inference.engine.replay import PassCounts
from inference.engine.requests import AfterToken, Completion, Request, Response, TokenEvent
from inference.engine.sampling import Sampler
from inference.tensor_parallel import get_sharing_group, get_tp_group
from pipeline.kernels.decode_attention import PAGE
from pipeline.models.forward.forward import base_model, context_length
from pipeline.parallel import launched
from pipeline.parallel.group import Group
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.memory import available_bytes

KeyedPrompt = tuple[tuple[int, ...], int]
"""Token ids of a prompt, and the key that selects its samples."""


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
    on_response: Callable[[int, Response], None] | None = None,
) -> list[Response]:
    """Return a response to each prompt, in the order of the prompts.

    Sampling is keyed by (seed, key of the prompt, position), so it does not depend on the order of
    the prompts or on what else is in the batch. A response also ends at the end of the model's
    context.

    Args:
        model: a causal language model, plain or with adapters.
        prompts: token ids of each prompt, none empty; identical prompts are prefilled once.
        max_new_tokens: maximum number of tokens in a response, including its stop token.
        temperature: divides the logits before sampling; 0 selects greedy decoding.
        stop_ids: tokens that end a response.
        seed: sampling seed.
        top_p: sample only from the most likely tokens that together reach this probability.
        keys: for each prompt, a number that selects its sample; by default, its index.
        batch_size: maximum number of sequences that run at once.
        on_response: called with (index of the prompt, response) as each response ends.

    Raises:
        DataError: a prompt is empty, contains unknown token ids, or fills the model's context.
    """
    completions = generate_each(
        model,
        prompts,
        Sampler(temperature=temperature, top_p=top_p, seed=seed, stop_ids=tuple(stop_ids)),
        max_new_tokens=max_new_tokens,
        keys=keys,
        batch_size=batch_size,
    )
    responses: dict[int, Response] = {}
    for completion in completions:
        responses[completion.index] = completion.response
        if on_response is not None:
            on_response(completion.index, completion.response)
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
    num_top: int | None = None,
    stop_when: AfterToken | None = None,
    passes: PassCounts | None = None,
) -> Iterator[Completion]:
    """Respond to the prompts like `generate`, yielding each response when it ends.

    At most `batch_size` sequences run at once, fewer if their keys and values don't fit in
    `cache_bytes` (by default, `free_bytes`). `stop_when` is called after each token and can end a
    response; it requires an unsharded model. `passes` counts passes; for `num_top`, see `Request`.

    If the model is sharded over processes, all of them must call this with the same settings, each
    with its own prompts, and exhaust the iterator. Processes with the same prompts each respond to
    a share of them.

    Raises:
        DataError: a prompt is empty, contains unknown token ids, or fills the model's context.
        ConfigError: there is no room for the keys and values of one sequence.
    """
    plain = base_model(model)
    tp_group, sharing_group = get_tp_group(plain), get_sharing_group(plain)
    keys = range(len(prompts)) if keys is None else keys
    keyed = [(tuple(prompt), key) for prompt, key in zip(prompts, keys, strict=True)]
    share = -(-len(keyed) // sharing_group.size)
    first = sharing_group.rank * share
    # Consecutive prompts are often equal, so give each process a contiguous share.
    gathered, indices = gather_prompts(keyed[first : first + share], tp_group)
    requests = [
        Request(prompt, sampler, key, min(max_new_tokens, room), num_top=num_top)
        for prompt, key in gathered
        for room in [remaining_context(plain, len(prompt))]
    ]
    completions: Iterator[Completion] = iter(())
    if requests:
        if cache_bytes is None:
            cache_bytes = free_bytes(next(model.parameters()).device)
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        smallest_cache = min(tp_group.gather_objects(cache_bytes))
        num_pages = fitting_pages(plain, smallest_cache, num_tokens=longest)
        num_slots = min(batch_size, len(requests))
        if not supports_slots(plain):
            num_slots = min(num_slots, (num_pages - 1) // count_pages(longest))
        batch = OpenBatch(
            model,
            num_slots=num_slots,
            capacity=longest,
            num_pages=min(num_pages, max_pages(requests, num_slots)),
            passes=passes,
        )
        completions = run_batch(batch, requests, stop_when)
    return _gather_shares(_local_completions(completions, indices, tp_group), first, sharing_group)


def gather_prompts(
    prompts: Sequence[KeyedPrompt], tp_group: Group
) -> tuple[list[KeyedPrompt], list[list[int]]]:
    """Gather the prompts of a tensor-parallel group, in rank order.

    A prompt that several processes hold under the same key, as the tensor-parallel groups of
    training do, is gathered only once.

    Returns:
        (the gathered prompts, and the indices of each one in this process's `prompts`).
    """
    indices: dict[tuple[KeyedPrompt, int], list[int]] = {}
    for rank, rank_prompts in enumerate(tp_group.gather_objects(list(prompts))):
        counts: Counter[KeyedPrompt] = Counter()
        for index, prompt in enumerate(rank_prompts):
            counts[prompt] += 1
            local_indices = indices.setdefault((prompt, counts[prompt]), [])
            if rank == tp_group.rank:
                local_indices.append(index)
    return [prompt for prompt, _ in indices], list(indices.values())


def _local_completions(
    completions: Iterator[Completion], indices: Sequence[Sequence[int]], tp_group: Group
) -> Iterator[Completion]:
    """Yield the responses to this process's prompts.

    Raises:
        TokenMismatchError: the processes did not choose the same tokens.
    """
    checksum = 0
    for completion in completions:
        if tp_group.size > 1:
            tokens = completion.index, completion.response.ids
            checksum = zlib.crc32(repr(tokens).encode(), checksum)
        for index in indices[completion.index]:
            yield replace(completion, index=index)
    if len(set(tp_group.gather_objects(checksum))) > 1:
        raise TokenMismatchError(
            "the processes of a tensor-parallel group chose different tokens; check that their"
            " software versions and devices match"
        )


def _gather_shares(
    completions: Iterator[Completion], first: int, sharing_group: Group
) -> Iterator[Completion]:
    """Yield this process's responses when they end, then those of the other processes."""
    local: list[Completion] = []
    for completion in completions:
        local.append(replace(completion, index=first + completion.index))
        yield local[-1]
    for rank, shared in enumerate(sharing_group.gather_objects(local)):
        if rank != sharing_group.rank:
            yield from shared


class TokenMismatchError(RuntimeError):
    """Processes of a tensor-parallel group chose different tokens."""


def run_batch(
    batch: OpenBatch, requests: Sequence[Request], stop_when: AfterToken | None
) -> Iterator[Completion]:
    """Submit all requests at once, and yield each response when it ends."""
    indices = {batch.submit(request): index for index, request in enumerate(requests)}
    batch.close()
    while batch.busy:
        for event in batch.step():
            ticket, index = event.ticket, indices[event.ticket]
            if not isinstance(event, TokenEvent):
                if event.error is not None:
                    try:
                        raise event.error
                    finally:
                        del event  # a reference cycle would keep the cache alive
                yield Completion(index, ticket.request.prompt, ticket.response)
                continue
            if stop_when is not None and stop_when(index, ticket.response.ids):
                batch.cancel(ticket)


def max_pages(requests: Sequence[Request], num_slots: int) -> int:
    """Return an upper bound on the pages that the requests need while `num_slots` of them run.

    Sequences with identical prompts share the pages that the prompt fills.
    """
    prompts = {request.prompt for request in requests}
    shared = sorted((len(prompt) - 1) // PAGE for prompt in prompts)
    private = sorted(
        count_pages(len(r.prompt) + r.max_new_tokens) - (len(r.prompt) - 1) // PAGE
        for r in requests
    )
    return 1 + sum(shared[-num_slots:]) + sum(private[-num_slots:])


def fitting_pages(model: PreTrainedModel, cache_bytes: int, *, num_tokens: int) -> int:
    """Return the number of cache pages that fit in `cache_bytes`.

    Raises:
        ConfigError: not even one sequence of `num_tokens` tokens fits.
    """
    bytes_per_page = page_bytes(model)
    needed = (1 + count_pages(num_tokens)) * bytes_per_page
    if needed > cache_bytes:
        raise ConfigError(
            f"the keys and values of one sequence of {num_tokens} tokens take {needed:,} bytes, but"
            f" only {cache_bytes:,} are available; lower max_new_tokens or shorten the prompts"
        )
    return cache_bytes // bytes_per_page


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes available for keys and values.

    On a GPU, this is nine tenths of the free memory, leaving the rest for activations; on a CPU,
    half of this process's share of it, leaving the rest for activations and the system.
    """
    if device.type != "cuda":
        return available_bytes() // (2 * launched.local_world_size())
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + cached) * 9 // 10


def remaining_context(model: PreTrainedModel, num_tokens: int) -> int:
    """Return the number of tokens left in the model's context after `num_tokens`.

    Raises:
        DataError: the prompt leaves no room.
    """
    limit = context_length(model)
    if num_tokens >= limit:
        raise DataError(
            f"a prompt has {num_tokens} tokens, but the model's context is {limit}, including the"
            " response; shorten the prompt"
        )
    return limit - num_tokens
