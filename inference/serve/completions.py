"""`POST /v1/chat/completions` and `POST /v1/completions`."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from inference.engine.sampling import Reported
from inference.serve.http import (
    DONE,
    SIGN_OF_LIFE,
    ApiError,
    EventStream,
    event,
    json_response,
    until_gone,
)
from inference.serve.jobs import Piece, Wanted
from inference.serve.objects import RowSoFar, Usage, chat_logprobs, new_id, text_logprobs
from inference.serve.sampling import check_prompt, check_tokens, seed_of, wanted_of
from inference.serve.schema import ChatRequest, CompletionRequest, SamplingFields, read_request
from inference.serve.served import ServedModel
from inference.serve.state import State, client_of, off_loop, read_body, size_of, state_of
from inference.streaming import plain_text

F = TypeVar("F", bound=SamplingFields)


@dataclass(kw_only=True)
class Reply:
    """A request that was read, and the objects of its responses."""

    state: State
    served: ServedModel
    client: str
    seed: int
    id: str
    wanted: list[Wanted]
    """Empty if the prompts are only scored."""

    num_prompt: int
    """Tokens of all prompts."""

    per_prompt: int
    """Responses to each prompt."""

    wants_usage: bool
    returns_ids: bool
    kind: str
    """OpenAI's name of the object."""

    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_rows(self) -> int:
        """Responses in all."""
        return sum(len(wanted.keys) for wanted in self.wanted)

    def row(self) -> RowSoFar:
        """The state of the log-probabilities of a response."""
        return RowSoFar(self.served, begins=False)

    def usage(self) -> Usage:
        """Tokens, none of a response yet."""
        return Usage(self.num_prompt, self.per_prompt)

    def object(self, choices: Sequence[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        """A response, or a chunk of a stream."""
        del chunk
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": f"fp_{self.served.weights_hash}",
            "seed": self.seed,
            "choices": choices,
        }

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        """A whole response."""
        raise NotImplementedError

    def part(self, row: RowSoFar, piece: Piece) -> dict[str, Any]:
        """A piece of a response in a stream."""
        raise NotImplementedError

    def openings(self, rows: Sequence[RowSoFar]) -> Iterator[dict[str, Any]]:
        """The first chunks of a stream."""
        raise NotImplementedError

    def ids(self, piece: Piece) -> dict[str, Any]:
        """The field `token_ids`, if it was requested."""
        return {"token_ids": piece.ids} if self.returns_ids else {}


async def _whole(reply: Reply) -> dict[str, Any]:
    found: dict[int, Piece] = {}
    if reply.wanted:
        broker = reply.state.broker
        with broker.open(reply.wanted, reply.client, streams=False) as job:
            async for pieces in broker.pieces(job):
                found |= {piece.row: piece for piece in pieces}
    usage = reply.usage()
    for piece in found.values():
        usage.add(piece)
    choices = [
        reply.choice(number, found.get(number, Piece(number, finish="length")))
        for number in range(reply.num_rows)
    ]
    return reply.object(choices) | {"usage": usage.json}


async def _events(reply: Reply) -> AsyncGenerator[bytes]:
    """The events of a stream, after an empty one that says that the request was admitted."""
    rows, usage = [reply.row() for _ in range(reply.num_rows)], reply.usage()
    with_usage = {"usage": None} if reply.wants_usage else {}
    with ExitStack() as stack:
        broker, job = reply.state.broker, None
        if reply.wanted:
            job = stack.enter_context(broker.open(reply.wanted, reply.client, streams=True))
        yield b""
        for choice in reply.openings(rows):
            yield event(reply.object([choice], chunk=True) | with_usage)
        if job is not None:
            async for pieces in broker.pieces(job):
                parts = b"" if pieces else SIGN_OF_LIFE
                for piece in pieces:
                    usage.add(piece)
                    choice = reply.part(rows[piece.row], piece)
                    parts += event(reply.object([choice], chunk=True) | with_usage)
                yield parts
    if reply.wants_usage:
        yield event(reply.object([], chunk=True) | {"usage": usage.json})
    yield DONE


async def _respond(reply: Reply, request: Request, ignored: str, *, streams: bool) -> Response:
    headers = {"x-ignored-fields": ignored} if ignored else {}
    if not streams:
        content = await until_gone(request.receive, _whole(reply))
        return json_response(content, headers=headers)
    events = _events(reply)
    await anext(events)  # so that a refusal has its own status
    return EventStream(events, headers)


@dataclass(kw_only=True)
class ChatReply(Reply):
    """A reply to a chat."""

    logprobs: bool
    continues: bool

    def row(self) -> RowSoFar:
        """The state of the log-probabilities of a response."""
        return RowSoFar(self.served, begins=not self.continues)

    def object(self, choices: Sequence[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        """A response, or a chunk of a stream."""
        return super().object(choices) | ({"object": f"{self.kind}.chunk"} if chunk else {})

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        """A whole response."""
        return {
            "index": number,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": chat_logprobs(self.row(), piece) if self.logprobs else None,
            "finish_reason": piece.finish,
        } | self.ids(piece)

    def part(self, row: RowSoFar, piece: Piece) -> dict[str, Any]:
        """A piece of a response in a stream."""
        return {
            "index": piece.row,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": chat_logprobs(row, piece) if self.logprobs else None,
            "finish_reason": piece.finish,
        } | self.ids(piece)

    def openings(self, rows: Sequence[RowSoFar]) -> Iterator[dict[str, Any]]:
        """The role of each response."""
        for number in range(len(rows)):
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


async def chat_completions(request: Request) -> Response:
    """Responses to a dialogue, whole or as a stream."""
    state = state_of(request)
    fields, ignored = read_request(ChatRequest, await read_body(request))
    size = size_of([each.message for each in fields.messages], fields.chat_template_kwargs)
    reply = await off_loop(size, _read_chat, state, fields, client_of(request))
    return await _respond(reply, request, ignored, streams=bool(fields.stream))


def _read_chat(state: State, fields: ChatRequest, client: str) -> ChatReply:
    served, seed = state.model(fields.model), seed_of(fields)
    continues = bool(fields.continue_final_message)
    prompt = served.encode_chat(
        [each.message for each in fields.messages],
        continues=continues,
        opens=fields.opens,
        arguments=fields.chat_template_kwargs,
    )
    limit = fields.max_completion_tokens
    wanted = wanted_of(
        *(fields, served, [prompt], state.config),
        seed=seed,
        max_tokens=fields.max_tokens if limit is None else limit,
        num_top=fields.num_top,
        continues=continues,
        client=client,
    )
    return ChatReply(
        state=state,
        served=served,
        client=client,
        seed=seed,
        id=new_id("chatcmpl"),
        wanted=wanted,
        num_prompt=len(prompt),
        per_prompt=fields.n or 1,
        wants_usage=fields.wants_usage,
        returns_ids=bool(fields.return_token_ids),
        kind="chat.completion",
        logprobs=bool(fields.logprobs),
        continues=continues,
    )


@dataclass(kw_only=True)
class TextReply(Reply):
    """A reply to texts or token ids that the model continues."""

    prompts: list[list[int]]
    echoes: list[str] | None
    """The text of each prompt, if it is part of the responses."""

    num_top: int | None
    scores: list[list[Reported | None]] = field(default_factory=list)
    """Log-probabilities of each prompt, if it is echoed with them."""

    @property
    def num_rows(self) -> int:
        """Responses in all."""
        return len(self.prompts) * self.per_prompt

    async def score_prompts(self) -> None:
        """Compute the log-probabilities of echoed prompts."""
        served, num_top = self.served, self.num_top
        if self.echoes is None or num_top is None:
            return
        for prompt in self.prompts:
            score: Callable[[], list[Reported | None]] = lambda prompt=prompt: (  # noqa: E731
                served.prompt_logprobs(prompt, num_top)
            )
            self.scores.append(await self.state.broker.call(score))

    def choice(self, number: int, piece: Piece) -> dict[str, Any]:
        """A whole response, after the prompt if it is echoed."""
        index, text, logprobs = number // self.per_prompt, piece.text, None
        tokens = self.row().tokens(piece)
        if self.echoes is not None:
            text = self.echoes[index] + text
        if self.num_top is not None:
            if self.scores:
                parts = self.served.bytes_of.of_all(self.prompts[index], begins=True)
                prompt = zip(self.prompts[index], parts, self.scores[index], strict=True)
                tokens = [*prompt, *tokens]
            logprobs = text_logprobs(RowSoFar(self.served, begins=self.echoes is None), tokens)
        return {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        } | self.ids(piece)

    def part(self, row: RowSoFar, piece: Piece) -> dict[str, Any]:
        """A piece of a response in a stream."""
        with_logprobs = self.num_top is not None
        return {
            "index": piece.row,
            "text": piece.text,
            "logprobs": text_logprobs(row, row.tokens(piece)) if with_logprobs else None,
            "finish_reason": piece.finish,
        } | self.ids(piece)

    def openings(self, rows: Sequence[RowSoFar]) -> Iterator[dict[str, Any]]:
        """The echoed prompts."""
        for number, row in enumerate(rows if self.echoes is not None else ()):
            choice = self.choice(number, Piece(number, finish=None if self.wanted else "length"))
            row.offset = len(choice["text"])
            yield choice


async def completions(request: Request) -> Response:
    """Continuations of one or more prompts, whole or as a stream."""
    state = state_of(request)
    fields, ignored = read_request(CompletionRequest, await read_body(request))
    size = sum(map(len, fields.prompts))
    reply = await off_loop(size, _read_texts, state, fields, client_of(request))
    await until_gone(request.receive, reply.score_prompts())
    return await _respond(reply, request, ignored, streams=bool(fields.stream))


def _read_texts(state: State, fields: CompletionRequest, client: str) -> TextReply:
    served, seed, given = state.model(fields.model), seed_of(fields), fields.prompts
    if not given:
        raise ApiError(400, "prompt is empty; give a text or token ids", param="prompt")
    if fields.best_of not in (None, fields.n or 1):
        raise ApiError(400, "best_of is not supported: leave it out, or as n", param="best_of")
    prompts = [served.encode_text(each) if isinstance(each, str) else each for each in given]
    only_scores = bool(fields.echo) and fields.max_tokens == 0
    for prompt in prompts:
        check_tokens(served, prompt)
        check_prompt(served, len(prompt), after=0 if only_scores else 1)
    wanted: list[Wanted] = []
    if not only_scores:
        wanted = wanted_of(
            *(fields, served, prompts, state.config),
            seed=seed,
            max_tokens=16 if fields.max_tokens is None else fields.max_tokens,  # OpenAI's default
            num_top=fields.logprobs,
            continues=True,
            client=client,
        )
    echoes = [
        each if isinstance(each, str) else plain_text(served.tokenizer, each) for each in given
    ]
    return TextReply(
        state=state,
        served=served,
        client=client,
        seed=seed,
        id=new_id("cmpl"),
        wanted=wanted,
        num_prompt=sum(map(len, prompts)),
        per_prompt=fields.n or 1,
        wants_usage=fields.wants_usage,
        returns_ids=bool(fields.return_token_ids),
        kind="text_completion",
        prompts=prompts,
        echoes=echoes if fields.echo else None,
        num_top=fields.logprobs,
    )
