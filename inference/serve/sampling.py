"""From a request's fields to what the generation thread is to do."""

import secrets
from collections.abc import Mapping, Sequence

from inference.engine.requests import sample_key
from inference.engine.sampling import Sampler
from inference.serve.config import ServeConfig
from inference.serve.http import ApiError
from inference.serve.jobs import Wanted
from inference.serve.schema import SamplingFields
from inference.serve.served import ServedModel

MOST_ROWS = 1024
"""Responses of one request."""


def seed_of(request: SamplingFields) -> int:
    """The request's seed, or a random one; the response names it."""
    return secrets.randbelow(2**31) if request.seed is None else request.seed


def wanted_of(
    request: SamplingFields,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    config: ServeConfig,
    *,
    seed: int,
    max_tokens: int | None,
    num_top: int | None,
    continues: bool,
    client: str,
) -> list[Wanted]:
    """What each prompt is to be answered with.

    The samples are those that `python -m inference.generate` draws for the same rows and seed.

    Raises:
        ApiError: a prompt or a setting is out of range.
    """
    count = request.n or 1
    if count > config.max_n:
        raise ApiError(400, f"n must be at most {config.max_n}, got {count}", param="n")
    if count * len(prompts) > MOST_ROWS:
        raise ApiError(400, f"a request has at most {MOST_ROWS} responses", param="n")
    for prompt in prompts:
        check_tokens(served, prompt)
    sampler = _sampler(request, served, seed)
    return [
        Wanted(
            model=served.name,
            prompt=tuple(prompt),
            sampler=sampler,
            keys=tuple(sample_key(row, sample) for sample in range(count)),
            max_new_tokens=_length(request, served, len(prompt), max_tokens, config),
            stops=request.stops,
            num_top=num_top,
            scope=client if config.prefix_reuse == "client" else "",
            continues=continues,
        )
        for row, prompt in enumerate(prompts)
    ]


def _length(
    request: SamplingFields,
    served: ServedModel,
    num_prompt: int,
    max_tokens: int | None,
    config: ServeConfig,
) -> int:
    room = check_prompt(served, num_prompt)
    length = min(config.max_tokens_default, room) if max_tokens is None else max_tokens
    if length > room:
        raise ApiError(
            400,
            f"the prompt has {num_prompt} tokens and {length} are asked for, and {served.name}"
            f" holds {served.context} in all; shorten the prompt or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if length < 1:
        raise ApiError(400, "max_tokens must be above 0", param="max_tokens")
    if (request.min_tokens or 0) > length:
        raise ApiError(400, f"min_tokens must be at most max_tokens, {length}", param="min_tokens")
    return length


def check_prompt(served: ServedModel, num_prompt: int, *, after: int = 1) -> int:
    """How many tokens may follow a prompt.

    Raises:
        ApiError: it is empty, or leaves no room for `after` tokens.
    """
    if num_prompt == 0:
        raise ApiError(400, "a prompt has no tokens; give it at least one", param="prompt")
    room = served.context - num_prompt
    if room < after:
        raise ApiError(
            400,
            f"the prompt has {num_prompt} tokens, and {served.name} holds {served.context}, prompt"
            " and response; shorten it",
            param="messages",
            code="context_length_exceeded",
        )
    return room


def check_tokens(served: ServedModel, ids: Sequence[int]) -> None:
    """Refuse token ids that the model has none of, of a request or of a tokenizer not its own.

    Raises:
        ApiError: there is one.
    """
    if ids and max(ids) >= served.vocabulary:
        raise ApiError(
            400,
            f"prompt has the token id {max(ids)}, and those of {served.name} are 0 to"
            f" {served.vocabulary - 1}; use its own tokenizer",
            param="prompt",
        )


def _sampler(request: SamplingFields, served: ServedModel, seed: int) -> Sampler:
    return Sampler(
        temperature=1.0 if request.temperature is None else request.temperature,
        seed=seed,
        top_k=request.top_k if request.top_k and request.top_k > 0 else None,
        top_p=request.top_p or 1.0,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_bias(request.logit_bias or {}, served),
        min_new_tokens=request.min_tokens or 0,
        stop_ids=tuple(served.chat.stop_ids),
    )


def _bias(given: Mapping[str, float], served: ServedModel) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for word, value in given.items():
        is_token = word.isascii() and word.isdigit() and len(word) < 10
        if not is_token or int(word) >= served.vocabulary:
            raise ApiError(
                400,
                f"logit_bias: {word[:32]} is not a token id of {served.name}; they are 0 to"
                f" {served.vocabulary - 1}",
                param="logit_bias",
            )
        if not -100 <= value <= 100:
            raise ApiError(
                400, f"logit_bias must lie in [-100, 100], got {value:g}", param="logit_bias"
            )
        found[int(word)] = value
    return tuple(sorted(found.items()))
