"""`POST /v1/completions`: texts or token ids that the model goes on with."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference.engine.requests import Reported
from inference.serve.body import read_json
from inference.serve.errors import ApiError, json_response
from inference.serve.generation import Piece, Wanted
from inference.serve.openai_objects import RowSoFar, Usage, head, new_id, text_logprobs
from inference.serve.prompt_logprobs import prompt_logprobs
from inference.serve.sampling import check_prompt, check_tokens, seed_of, wanted_of
from inference.serve.schema import CompletionRequest, read_request
from inference.serve.served import ServedModel
from inference.serve.state import State, client_of, off_loop, state_of
from inference.serve.stream import DONE, SIGN_OF_LIFE, EventStream, event, until_gone
from inference.streaming import plain_text

OBJECT = "text_completion"


@dataclass(frozen=True)
class Completion:
    """A request that was read."""

    state: State
    request: CompletionRequest
    served: ServedModel
    prompts: list[list[int]]
    texts: list[str]
    """What each prompt echoes."""
    wanted: list[Wanted]
    """Empty where the prompts are scored alone."""
    seed: int
    client: str
    name: str

    @property
    def count(self) -> int:
        """Responses to each prompt."""
        return self.request.n or 1

    def usage(self) -> Usage:
        """Tokens, none of a response yet."""
        return Usage(sum(map(len, self.prompts)), self.count)

    @property
    def with_logprobs(self) -> bool:
        """Whether choices have log-probabilities."""
        return self.request.logprobs is not None

    def object(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A response, or a part of one."""
        return {**head(self.served, OBJECT, self.name), "seed": self.seed, "choices": choices}


async def completions(request: Request) -> Response:
    """What follows one or more prompts, at once or as it comes."""
    state = state_of(request)
    config = state.config
    body = await read_json(request, limit=config.max_body, seconds=config.idle_seconds)
    fields, ignored = read_request(CompletionRequest, body)
    size = sum(map(len, fields.prompts))
    read = await off_loop(size, _read, state, fields, client_of(request))
    headers = {"x-ignored-fields": ignored} if ignored else {}
    echoed = await until_gone(request.receive, _echoed(read))
    if not fields.stream:
        content = await until_gone(request.receive, _whole(read, echoed))
        return json_response(content, headers=headers)
    events = _events(read, echoed)
    await anext(events)  # so that a refusal has a status of its own
    return EventStream(events, headers)


def _read(state: State, fields: CompletionRequest, client: str) -> Completion:
    served = state.model(fields.model)
    given = fields.prompts
    if not given:
        raise ApiError(400, "prompt is empty; give a text or token ids", param="prompt")
    if fields.best_of not in (None, fields.n or 1):
        raise ApiError(400, "best_of is not supported: leave it out, or as n", param="best_of")
    prompts = [served.encode_text(each) if isinstance(each, str) else each for each in given]
    for prompt in prompts:
        check_tokens(served, prompt)
    if fields.echo:
        texts = [
            each if isinstance(each, str) else plain_text(served.tokenizer, each) for each in given
        ]
    else:
        texts = [""] * len(given)
    only_scores = bool(fields.echo) and fields.max_tokens == 0
    for prompt in prompts:
        check_prompt(served, len(prompt), after=0 if only_scores else 1)
    seed = seed_of(fields)
    wanted = [] if only_scores else _wanted(state, fields, served, prompts, seed, client)
    name = new_id("cmpl")
    return Completion(state, fields, served, prompts, texts, wanted, seed, client, name)


def _wanted(
    state: State,
    fields: CompletionRequest,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    seed: int,
    client: str,
) -> list[Wanted]:
    length = 16 if fields.max_tokens is None else fields.max_tokens  # as OpenAI's default is
    return wanted_of(
        *(fields, served, prompts, state.config),
        seed=seed,
        max_tokens=length,
        num_top=fields.logprobs,
        continues=True,
        client=client,
    )


async def _whole(read: Completion, echoed: Sequence[Sequence[Reported | None]]) -> dict[str, Any]:
    found: dict[int, Piece] = {}
    if read.wanted:
        with read.state.broker.open(read.wanted, read.client, streams=False) as job:
            async for pieces in read.state.broker.pieces(job):
                found |= {piece.row: piece for piece in pieces}
    choices = [
        _choice(read, number, found.get(number, Piece(number, finish="length")), echoed)
        for number in range(len(read.prompts) * read.count)
    ]
    usage = read.usage()
    for piece in found.values():
        usage.add(piece)
    return read.object(choices) | {"usage": usage.json}


async def _echoed(read: Completion) -> list[list[Reported | None]]:
    """What the model says of each prompt, where it is echoed with log-probabilities."""
    if not read.request.echo or read.request.logprobs is None:
        return []
    served, top = read.served, read.request.logprobs
    return [
        await read.state.broker.call(lambda prompt=prompt: prompt_logprobs(served, prompt, top))
        for prompt in read.prompts
    ]


def _choice(
    read: Completion, number: int, piece: Piece, echoed: Sequence[Sequence[Reported | None]]
) -> dict[str, Any]:
    """A whole choice, the prompt in front where it is echoed."""
    place = number // read.count
    row = RowSoFar(read.served, begins=not read.request.echo)
    logprobs = None
    if read.with_logprobs:
        tokens = _prompt_tokens(read, place, echoed) if read.request.echo else []
        logprobs = text_logprobs(row, [*tokens, *_row_tokens(read, piece)])
    return {
        "index": number,
        "text": read.texts[place] + piece.text,
        "logprobs": logprobs,
        "finish_reason": piece.finish,
    } | ({"token_ids": piece.ids} if read.request.return_token_ids else {})


def _row_tokens(read: Completion, piece: Piece) -> list[tuple[int, bytes, Reported | None]]:
    return [*RowSoFar(read.served, begins=False).tokens(piece)]


def _prompt_tokens(
    read: Completion, place: int, echoed: Sequence[Sequence[Reported | None]]
) -> list[tuple[int, bytes, Reported | None]]:
    prompt = read.prompts[place]
    parts = read.served.bytes_of.of_all(prompt, begins=True)
    return list(zip(prompt, parts, echoed[place], strict=True))


async def _events(
    read: Completion, echoed: Sequence[Sequence[Reported | None]]
) -> AsyncGenerator[bytes]:
    """The events of a stream, after one of no bytes that says that the request was let in."""
    rows = [RowSoFar(read.served, begins=False) for _ in range(len(read.prompts) * read.count)]
    broker, usage = read.state.broker, read.usage()
    with_usage = {"usage": None} if read.request.wants_usage else {}
    with ExitStack() as held:
        job = None
        if read.wanted:
            job = held.enter_context(broker.open(read.wanted, read.client, streams=True))
        yield b""
        for number in range(len(rows) if read.request.echo else 0):
            choice = _choice(read, number, Piece(number, finish=None if job else "length"), echoed)
            rows[number].offset = len(choice["text"])
            yield event(read.object([choice]) | with_usage)
        async for pieces in broker.pieces(job) if job else _nothing():
            parts = b"" if pieces else SIGN_OF_LIFE
            for piece in pieces:
                usage.add(piece)
                parts += event(read.object([_part(read, rows[piece.row], piece)]) | with_usage)
            yield parts
    if read.request.wants_usage:
        yield event(read.object([]) | {"usage": usage.json})
    yield DONE


async def _nothing() -> AsyncGenerator[list[Piece]]:
    for piece in ():
        yield piece


def _part(read: Completion, row: RowSoFar, piece: Piece) -> dict[str, Any]:
    logprobs = None
    if read.with_logprobs:
        logprobs = text_logprobs(row, [*row.tokens(piece)])
    return {
        "index": piece.row,
        "text": piece.text,
        "logprobs": logprobs,
        "finish_reason": piece.finish,
    } | ({"token_ids": piece.ids} if read.request.return_token_ids else {})
