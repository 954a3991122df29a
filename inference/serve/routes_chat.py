"""`POST /v1/chat/completions`."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference.serve.body import read_json
from inference.serve.errors import json_response
from inference.serve.generation import Job, Piece, Wanted
from inference.serve.openai_objects import RowSoFar, Usage, chat_logprobs, head, new_id
from inference.serve.sampling import seed_of, wanted_of
from inference.serve.schema import ChatRequest, read_request
from inference.serve.served import ServedModel
from inference.serve.state import State, client_of, off_loop, size_of, state_of
from inference.serve.stream import DONE, SIGN_OF_LIFE, EventStream, event, until_gone


@dataclass(frozen=True)
class Chat:
    """A request that was read."""

    state: State
    request: ChatRequest
    served: ServedModel
    wanted: Wanted
    seed: int
    client: str
    name: str

    def usage(self) -> Usage:
        """Tokens, none of a response yet."""
        return Usage(len(self.wanted.prompt), len(self.wanted.keys))

    def rows(self) -> list[RowSoFar]:
        """One for each response."""
        begins = not self.wanted.continues
        return [RowSoFar(self.served, begins) for _ in self.wanted.keys]

    def head(self, kind: str) -> dict[str, Any]:
        """What each object begins with."""
        return {**head(self.served, kind, self.name), "seed": self.seed}


async def chat_completions(request: Request) -> Response:
    """Responses to a dialogue, at once or as they come."""
    state = state_of(request)
    config = state.config
    body = await read_json(request, limit=config.max_body, seconds=config.idle_seconds)
    fields, ignored = read_request(ChatRequest, body)
    chat = await off_loop(_size(fields), _read, state, fields, client_of(request))
    headers = {"x-ignored-fields": ignored} if ignored else {}
    if not fields.stream:
        content = await until_gone(request.receive, _whole(chat))
        return json_response(content, headers=headers)
    events = _events(chat)
    await anext(events)  # so that a refusal has a status of its own
    return EventStream(events, headers)


def _size(fields: ChatRequest) -> int:
    messages = [each.message for each in fields.messages]
    return size_of(messages, fields.chat_template_kwargs)


def _read(state: State, fields: ChatRequest, client: str) -> Chat:
    served = state.model(fields.model)
    continues = bool(fields.continue_final_message)
    prompt = served.encode_chat(
        [each.message for each in fields.messages],
        continues=continues,
        opens=fields.opens,
        arguments=fields.chat_template_kwargs,
    )
    seed = seed_of(fields)
    given = fields.max_completion_tokens
    (wanted,) = wanted_of(
        fields,
        served,
        [prompt],
        state.config,
        seed=seed,
        max_tokens=fields.max_tokens if given is None else given,
        num_top=fields.num_top,
        continues=continues,
        client=client,
    )
    return Chat(state, fields, served, wanted, seed, client, new_id("chatcmpl"))


async def _whole(chat: Chat) -> dict[str, Any]:
    with chat.state.broker.open([chat.wanted], chat.client, streams=False) as job:
        found = {piece.row: piece async for piece in _pieces(chat, job)}
    rows = chat.rows()
    choices = [_choice(chat, rows[number], found[number]) for number in sorted(found)]
    usage = chat.usage()
    for piece in found.values():
        usage.add(piece)
    return {**chat.head("chat.completion"), "choices": choices, "usage": usage.json}


async def _pieces(chat: Chat, job: Job) -> AsyncIterator[Piece]:
    async for pieces in chat.state.broker.pieces(job):
        for piece in pieces:
            yield piece


def _choice(chat: Chat, row: RowSoFar, piece: Piece) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": piece.row,
        "message": {"role": "assistant", "content": piece.text, "refusal": None},
        "logprobs": chat_logprobs(row, piece) if chat.request.logprobs else None,
        "finish_reason": piece.finish,
    }
    return choice | _token_ids(chat, piece)


def _token_ids(chat: Chat, piece: Piece) -> dict[str, Any]:
    return {"token_ids": piece.ids} if chat.request.return_token_ids else {}


async def _events(chat: Chat) -> AsyncGenerator[bytes]:
    """The events of a stream, after one of no bytes that says that the request was let in."""
    rows, usage = chat.rows(), chat.usage()
    with_usage = {"usage": None} if chat.request.wants_usage else {}
    first = chat.head("chat.completion.chunk")
    with chat.state.broker.open([chat.wanted], chat.client, streams=True) as job:
        yield b""
        for number in range(len(rows)):
            begin = {"role": "assistant", "content": "", "refusal": None}
            yield event(first | with_usage | {"choices": [_delta(number, begin)]})
        async for pieces in chat.state.broker.pieces(job):
            parts = b"" if pieces else SIGN_OF_LIFE
            for piece in pieces:
                usage.add(piece)
                choice = _part(chat, rows[piece.row], piece)
                parts += event(first | with_usage | {"choices": [choice]})
            yield parts
    if chat.request.wants_usage:
        yield event(first | {"choices": [], "usage": usage.json})
    yield DONE


def _part(chat: Chat, row: RowSoFar, piece: Piece) -> dict[str, Any]:
    """A choice of a stream, with what a piece adds to it."""
    choice = _delta(piece.row, {"content": piece.text} if piece.text else {})
    choice["finish_reason"] = piece.finish
    if chat.request.logprobs:
        choice["logprobs"] = chat_logprobs(row, piece)
    return choice | _token_ids(chat, piece)


def _delta(number: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
