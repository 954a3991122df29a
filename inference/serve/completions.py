"""`POST /v1/chat/completions` and `POST /v1/completions`: parse requests, format responses."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from inference.engine.requests import Request, sample_key
from inference.engine.sampling import Sampler, TokenLogprobs
from inference.serve.http import (
    DONE,
    KEEP_ALIVE,
    ApiError,
    cancel_on_disconnect,
    format_event,
    json_response,
    read_body,
    stream_response,
)
from inference.serve.models import ServedModel
from inference.serve.schema import ChatRequest, CompletionRequest, SamplingFields, read_request
from inference.serve.state import State, get_client, get_state
from inference.serve.worker import Job, Piece
from inference.text import encode_text, plain_text

MAX_ROWS = 1024
"""Maximum number of responses per request."""

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON can't represent."""


async def chat_completions(request: HttpRequest) -> Response:
    """Respond to a dialogue, at once or as a stream."""
    fields, ignored = read_request(ChatRequest, await read_body(request))
    # Tokenize on a thread: a long text would delay other clients' streams.
    reply = await asyncio.to_thread(ChatReply, get_state(request), fields, get_client(request))
    return await _respond(reply, request, ignored)


async def completions(request: HttpRequest) -> Response:
    """Continue one or more prompts, at once or as a stream."""
    fields, ignored = read_request(CompletionRequest, await read_body(request))
    reply = await asyncio.to_thread(TextReply, get_state(request), fields, get_client(request))
    await cancel_on_disconnect(request.receive, reply.score_prompts())
    return await _respond(reply, request, ignored)


async def _respond(reply: "ChatReply | TextReply", request: HttpRequest, ignored: str) -> Response:
    headers = {"x-ignored-fields": ignored} if ignored else {}
    if not reply.fields.stream:
        content = await cancel_on_disconnect(request.receive, _complete(reply))
        return json_response(content, headers=headers)
    events = _events(reply)
    await anext(events)  # so that an early error sets the status
    return stream_response(events, headers)


async def _complete(reply: "ChatReply | TextReply") -> dict[str, Any]:
    pieces: dict[int, Piece] = {}
    if reply.requests:
        broker = reply.state.broker
        job = reply.job(streams=False)
        with broker.open(job):
            async for batch in broker.pieces(job):
                pieces |= {piece.row: piece for piece in batch}
    choices = [
        reply.make_choice(number, pieces.get(number, Piece(number, finish="length")))
        for number in range(reply.num_rows)
    ]
    return reply.make_object(choices, reply.kind) | {"usage": count_usage(reply, pieces)}


async def _events(reply: "ChatReply | TextReply") -> AsyncGenerator[bytes]:
    """Yield an empty event once the request is admitted, then the events of its stream."""
    positions = [TextPosition(reply.served, reply.starts_text) for _ in range(reply.num_rows)]
    joined: dict[int, Piece] = {}
    with_usage = {"usage": None} if reply.fields.wants_usage else {}

    def chunk(*choices: dict[str, Any]) -> dict[str, Any]:
        return reply.make_object(choices, reply.chunk_kind) | with_usage

    with ExitStack() as stack:
        broker, job = reply.state.broker, None
        if reply.requests:
            job = reply.job(streams=True)
            stack.enter_context(broker.open(job))
        yield b""
        for choice in reply.initial_chunks(positions):
            yield format_event(chunk(choice))
        if job is not None:
            async for pieces in broker.pieces(job):
                events = b"" if pieces else KEEP_ALIVE
                for piece in pieces:
                    joined.setdefault(piece.row, Piece(piece.row)).join(piece)
                    events += format_event(chunk(reply.make_chunk(positions[piece.row], piece)))
                yield events
    if reply.fields.wants_usage:
        yield format_event(chunk() | {"usage": count_usage(reply, joined)})
    yield DONE


class Reply:
    """A parsed request; the base class of chat and text replies.

    Args:
        state: the server's state.
        fields: the request's fields.
        client: the client's name.

    Raises:
        ApiError: a field is out of range.
    """

    prefix: str
    kind: str
    """OpenAI's name for the object type."""
    chunk_kind: str
    prompt_field: str
    """Name of the field that contains the prompt."""
    starts_text: bool = False
    """Whether a response starts a new text, whose first word may lose its leading space."""

    def __init__(self, state: State, fields: SamplingFields, client: str) -> None:
        self.state = state
        self.served = state.model(fields.model)
        self.client = client
        self.seed = secrets.randbelow(2**31) if fields.seed is None else fields.seed
        self.per_prompt = fields.n or 1
        self.id, self.created = new_id(self.prefix), int(time.time())
        self.returns_ids = bool(fields.return_token_ids)
        self.prompts: list[list[int]] = []
        self.stops = fields.stops
        self.requests: list[list[Request]] = []
        """Requests for the responses to each prompt; empty if the prompts are only scored."""

    @property
    def num_rows(self) -> int:
        """Number of responses."""
        return len(self.prompts) * self.per_prompt

    def make_object(self, choices: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
        """Return a response object, or a chunk of a stream."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
            "system_fingerprint": f"fp_{self.served.weights_hash}",
            "seed": self.seed,
            "choices": choices,
        }

    def finish_fields(self, piece: Piece) -> dict[str, Any]:
        """Return the last fields of a choice."""
        ids = {"token_ids": piece.ids} if self.returns_ids else {}
        return {"finish_reason": piece.finish, **ids}

    def job(self, *, streams: bool) -> Job:
        """Create a job that generates the responses."""
        return Job(
            *(self.served.name, self.requests, self.client),
            stops=self.stops,
            continues=not self.starts_text,
            streams=streams,
        )

    def check_prompts(self, min_room: int = 1) -> None:
        """Raise ApiError if there are too many responses, or a prompt is invalid."""
        if self.per_prompt > (max_n := self.state.config.max_n):
            raise ApiError(400, f"n must be at most {max_n}, got {self.per_prompt}", param="n")
        if self.num_rows > MAX_ROWS:
            raise ApiError(400, f"a request can have at most {MAX_ROWS} responses", param="n")
        for prompt in self.prompts:
            check_prompt(self.served, prompt, self.prompt_field, min_room)

    def prepare(self, fields: SamplingFields, max_tokens: int | None, num_top: int | None) -> None:
        """Create the requests that generate the responses.

        The samples are those that `python -m inference.generate` draws for the same rows and seed.

        Raises:
            ApiError: a prompt or a setting is invalid.
        """
        self.check_prompts()
        scope = {"client": self.client, "all": "", "off": self.id}[self.state.config.prefix_reuse]
        sampler = _make_sampler(fields, self.served, self.seed)
        for row, prompt in enumerate(self.prompts):
            max_new_tokens = self._max_tokens(fields, len(prompt), max_tokens)
            self.requests.append(
                [
                    Request(
                        tuple(prompt),
                        sampler,
                        sample_key(row, sample),
                        max_new_tokens=max_new_tokens,
                        num_top=num_top,
                        scope=scope,
                    )
                    for sample in range(self.per_prompt)
                ]
            )

    def _max_tokens(self, fields: SamplingFields, num_prompt: int, max_tokens: int | None) -> int:
        max_length = self.served.context - num_prompt
        default = min(self.state.config.max_tokens_default, max_length)
        limit = default if max_tokens is None else max_tokens
        if limit > max_length:
            raise ApiError(
                400,
                f"the prompt has {num_prompt} tokens and {limit} are requested, but the context"
                f" length of {self.served.name} is {self.served.context}; shorten the prompt or"
                " lower max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if limit < 1:
            raise ApiError(400, "max_tokens must be positive", param="max_tokens")
        if (fields.min_tokens or 0) > limit:
            message = f"min_tokens must be at most max_tokens ({limit}), got {fields.min_tokens}"
            raise ApiError(400, message, param="min_tokens")
        return limit


def check_prompt(served: ServedModel, prompt: Sequence[int], param: str, min_room: int) -> None:
    """Reject a prompt that is empty, contains unknown ids, or leaves fewer than `min_room` tokens.

    Raises:
        ApiError: the prompt is rejected.
    """
    if not prompt:
        raise ApiError(400, "a prompt has no tokens; it needs at least one", param=param)
    if max(prompt) >= served.vocabulary:
        raise ApiError(
            400,
            f"a prompt has the token id {max(prompt)}, but the ids of {served.name} are 0 to"
            f" {served.vocabulary - 1}; use its tokenizer",
            param=param,
        )
    if served.context - len(prompt) < min_room:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens, but the context length of"
            f" {served.name} is {served.context}, including the response; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def _make_sampler(fields: SamplingFields, served: ServedModel, seed: int) -> Sampler:
    return Sampler(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        seed=seed,
        top_k=fields.top_k if fields.top_k and fields.top_k > 0 else None,
        top_p=1.0 if fields.top_p is None else max(fields.top_p, 1e-9),  # 0: only the likeliest
        min_p=fields.min_p or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_parse_bias(fields.logit_bias or {}, served),
        min_new_tokens=fields.min_tokens or 0,
        stop_ids=tuple(served.chat.stop_ids),
    )


def _parse_bias(values: Mapping[str, float], served: ServedModel) -> tuple[tuple[int, float], ...]:
    bias: dict[int, float] = {}
    for token, value in values.items():
        is_token = token.isascii() and token.isdigit() and len(token) < 10
        if not is_token or int(token) >= served.vocabulary:
            raise ApiError(
                400,
                f"logit_bias: {token[:32]} is not a token id of {served.name}, whose ids are 0 to"
                f" {served.vocabulary - 1}",
                param="logit_bias",
            )
        bias[int(token)] = value
    return tuple(sorted(bias.items()))


class ChatReply(Reply):
    """A reply to a dialogue."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"

    def __init__(self, state: State, fields: ChatRequest, client: str) -> None:
        super().__init__(state, fields, client)
        self.fields = fields
        continues = bool(fields.continue_final_message)
        self.starts_text = not continues
        prompt = self.served.encode_chat(
            [item.message for item in fields.messages],
            continues=continues,
            adds_prompt=fields.adds_prompt,
            arguments=fields.chat_template_kwargs,
        )
        self.prompts = [prompt]
        limit = fields.max_completion_tokens
        self.prepare(fields, fields.max_tokens if limit is None else limit, fields.num_top)

    def make_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        """Return the `choices` entry of a complete response."""
        return {
            "index": number,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(TextPosition(self.served, self.starts_text), piece),
            **self.finish_fields(piece),
        }

    def make_chunk(self, position: "TextPosition", piece: Piece) -> dict[str, Any]:
        """Return the `choices` entry of one chunk of a streamed response."""
        return {
            "index": piece.row,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(position, piece),
            **self.finish_fields(piece),
        }

    def initial_chunks(self, positions: Sequence["TextPosition"]) -> Iterator[dict[str, Any]]:
        """Yield the first chunks of a stream: the role of each response."""
        for number in range(len(positions)):
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, position: "TextPosition", piece: Piece) -> dict[str, Any] | None:
        if not self.fields.logprobs:
            return None
        vocab = self.served.token_bytes

        def entry(token: int, part: bytes, logprob: float) -> dict[str, Any]:
            name = part.decode(errors="replace") if part else vocab.name(token)
            return {"token": name, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(part)}

        content = [
            {
                **entry(token, part, logprobs.logprob),
                "top_logprobs": [entry(other, vocab.get(other), p) for other, p in logprobs.top],
            }
            for token, part, logprobs in position.tokens(piece)
        ]
        return {"content": content, "refusal": None}


class TextReply(Reply):
    """A reply to a prompt of text or token ids, which the model continues."""

    prefix, kind, chunk_kind, prompt_field = "cmpl", "text_completion", "text_completion", "prompt"

    def __init__(self, state: State, fields: CompletionRequest, client: str) -> None:
        super().__init__(state, fields, client)
        self.fields = fields
        tokenizer, prompts = self.served.tokenizer, fields.prompts
        self.scores: list[list[TokenLogprobs | None]] = []
        """Log-probabilities of each prompt's tokens; empty unless echoes include them."""
        if not prompts:
            raise ApiError(400, "prompt is empty; provide text or token ids", param="prompt")
        if fields.best_of not in (None, self.per_prompt):
            raise ApiError(
                400, "best_of is not supported; omit it, or set it to n", param="best_of"
            )
        self.prompts = [encode_text(tokenizer, p) if isinstance(p, str) else p for p in prompts]
        if fields.echo and fields.max_tokens == 0:
            self.check_prompts(min_room=0)
        else:
            limit = 16 if fields.max_tokens is None else fields.max_tokens  # OpenAI's default
            self.prepare(fields, limit, fields.logprobs)
        self.echoes: list[str] | None = None
        if fields.echo:
            self.echoes = [p if isinstance(p, str) else plain_text(tokenizer, p) for p in prompts]

    async def score_prompts(self) -> None:
        """Compute the log-probabilities of echoed prompts."""
        served, num_top = self.served, self.fields.logprobs
        if self.echoes is None or num_top is None:
            return
        for prompt in self.prompts:
            scores = await self.state.broker.call(
                lambda prompt=prompt: served.prompt_logprobs(prompt, num_top)
            )
            self.scores.append(scores)

    def make_choice(self, number: int, piece: Piece) -> dict[str, Any]:
        """Return the `choices` entry of a complete response, after the prompt if it is echoed."""
        index, text, logprobs = number // self.per_prompt, piece.text, None
        if self.echoes is not None:
            text = self.echoes[index] + text
        if self.fields.logprobs is not None:
            tokens: list[tuple[int, bytes, TokenLogprobs | None]] = []
            if self.scores:
                parts = self.served.token_bytes.get_all(self.prompts[index], starts_text=True)
                tokens += zip(self.prompts[index], parts, self.scores[index], strict=True)
            position = TextPosition(self.served, self.starts_text)
            logprobs = self._logprobs(position, [*tokens, *position.tokens(piece)])
        return {"index": number, "text": text, "logprobs": logprobs, **self.finish_fields(piece)}

    def make_chunk(self, position: "TextPosition", piece: Piece) -> dict[str, Any]:
        """Return the `choices` entry of one chunk of a streamed response."""
        logprobs = None
        if self.fields.logprobs is not None:
            logprobs = self._logprobs(position, position.tokens(piece))
        choice = {"index": piece.row, "text": piece.text, "logprobs": logprobs}
        return choice | self.finish_fields(piece)

    def initial_chunks(self, positions: Sequence["TextPosition"]) -> Iterator[dict[str, Any]]:
        """Yield the first chunks of a stream: the echoed prompts."""
        for number, position in enumerate(positions if self.echoes is not None else ()):
            piece = Piece(number, finish=None if self.requests else "length")
            choice = self.make_choice(number, piece)
            position.offset = len(choice["text"])
            yield choice

    def _logprobs(
        self, position: "TextPosition", tokens: Sequence[tuple[int, bytes, TokenLogprobs | None]]
    ) -> dict[str, Any]:
        """Return OpenAI's logprobs object; a prompt's first token has no log-probability."""
        vocab = self.served.token_bytes
        entries = [entry for *_, entry in tokens]
        tops = [None if e is None else (*e.top, (id_, e.logprob)) for id_, _, e in tokens]
        return {
            "tokens": [part.decode(errors="replace") or vocab.name(id_) for id_, part, _ in tokens],
            "token_logprobs": [None if e is None else max(e.logprob, MIN_LOGPROB) for e in entries],
            "top_logprobs": [
                None if top is None else {vocab.name(t): max(p, MIN_LOGPROB) for t, p in top}
                for top in tops
            ],
            "text_offset": [position.advance(part) for _, part, _ in tokens],
        }


def new_id(prefix: str) -> str:
    """Return a unique response id."""
    return f"{prefix}-{secrets.token_hex(12)}"


def count_usage(reply: Reply, pieces: Mapping[int, Piece]) -> dict[str, Any]:
    """Return OpenAI's usage; a prompt's cached tokens are those that all its responses reused."""
    num_prompt = sum(map(len, reply.prompts))
    num_completion = sum(len(piece.ids) for piece in pieces.values())
    reused: dict[int, int] = {}
    for row, piece in pieces.items():
        prompt = row // reply.per_prompt
        reused[prompt] = min(piece.num_reused, reused.get(prompt, piece.num_reused))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(reused.values())},
    }


@dataclass
class TextPosition:
    """Position in a response's text up to which tokens have been returned."""

    served: ServedModel
    starts_text: bool
    """Whether the next token with text is the first of a new text."""

    offset: int = 0
    """Number of characters before the next token, excluding an incomplete one."""
    _incomplete: bytes = field(default=b"", repr=False)

    def tokens(self, piece: Piece) -> list[tuple[int, bytes, TokenLogprobs]]:
        """Return (id, bytes, log-probabilities) of the piece's tokens that have text."""
        ids = piece.ids[: len(piece.logprobs)]
        parts = self.served.token_bytes.get_all(ids, starts_text=self.starts_text)
        self.starts_text = self.starts_text and set(ids) <= self.served.token_bytes.special
        return list(zip(ids, parts, piece.logprobs, strict=True))

    def advance(self, part: bytes) -> int:
        """Move past the next token, which has these bytes; return its offset."""
        offset = self.offset
        self._incomplete += part
        text = self._incomplete.decode(errors="ignore")
        self.offset += len(text)
        self._incomplete = self._incomplete[len(text.encode()) :]
        return offset
