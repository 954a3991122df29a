"""Requests on the generation thread, and the pieces of their responses."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from inference.engine.requests import Ended, Token
from inference.engine.sampling import Reported, Sampler
from inference.serve.served import ServedModel
from inference.serve.text import ResponseText

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Wanted:
    """Responses to one prompt."""

    model: str
    prompt: tuple[int, ...]
    sampler: Sampler
    keys: tuple[int, ...]
    """One for each response; with the sampler's seed it chooses the sample."""
    max_new_tokens: int
    stops: tuple[str, ...] = ()
    """Texts before which a response ends."""
    num_top: int | None = None
    """Of how many likeliest tokens log-probabilities are wanted; None is of no token."""
    scope: str = ""
    """Keys and values are shared by prompts of the same scope alone."""
    continues: bool = False
    """Whether the text goes on after the prompt's rather than beginning anew."""


@dataclass
class Piece:
    """More of a response."""

    row: int
    """Its number among the responses of the request."""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    """Tokens since the last piece, one that ends the response among them."""
    reported: list[Reported] = field(default_factory=list)
    """Of each of the tokens that have text, where log-probabilities are wanted."""
    num_reused: int = 0
    """Tokens of the prompt whose keys and values were there; with the first piece."""
    finish: Finish | None = None
    """Why it ended; None while it goes on."""
    error: str | None = None
    """What went wrong in it."""

    def join(self, later: "Piece") -> None:
        """Add the piece that follows."""
        self.text += later.text
        self.ids += later.ids
        self.reported += later.reported
        self.num_reused += later.num_reused
        self.finish, self.error = later.finish, later.error


class Job:
    """A request on its way: what it wants, and the pieces that nobody has read yet.

    The generation thread sets `started`; all else belongs to the event loop.
    """

    def __init__(self, wanted: Sequence[Wanted], client: str, *, streams: bool) -> None:
        self.wanted = tuple(wanted)
        self.client = client
        self.streams = streams
        """Whether pieces are read as they come; else each response comes whole."""
        self.started = False
        """Whether one of its prompts has a slot."""
        self._pieces: dict[int, Piece] = {}
        self._ready = asyncio.Event()

    @property
    def num_rows(self) -> int:
        """Responses in all."""
        return sum(len(each.keys) for each in self.wanted)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(each.prompt) for each in self.wanted)

    def put(self, piece: Piece) -> None:
        """More of a response has come. What a slow reader leaves unread is joined."""
        waiting = self._pieces.get(piece.row)
        if waiting is None:
            self._pieces[piece.row] = piece
        else:
            waiting.join(piece)
        self._ready.set()

    async def take(self) -> list[Piece]:
        """The pieces that have come, at least one, by row."""
        await self._ready.wait()
        self._ready.clear()
        pieces, self._pieces = self._pieces, {}
        return [pieces[row] for row in sorted(pieces)]


class Row:
    """One response of a job, with its text so far."""

    def __init__(self, job: Job, number: int, wanted: Wanted, served: ServedModel) -> None:
        self.job = job
        self.wanted = wanted
        self._text = ResponseText(served.bytes_of, wanted.stops, begins=not wanted.continues)
        self._piece = Piece(number)
        self.began, self.newest = time.perf_counter(), 0.0
        """When it was submitted and its newest token came, for the metrics."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string came."""
        return self._text.stopped

    def token(self, event: Token) -> Piece | None:
        """The piece that a token completes, if somebody reads it now."""
        if self.stopped:
            return None
        self._piece.ids.append(event.id)
        if not self.newest:
            self._piece.num_reused = event.ticket.num_reused
        if event.id in event.ticket.sampler.stop_ids:
            return None
        self._piece.text += self._text.add(event.id)
        if event.reported is not None:
            self._piece.reported.append(event.reported)
        if not self.job.streams or not self._piece.text:
            return None
        return self._take()

    def ended(self, event: Ended) -> Piece | None:
        """The last piece; none of a response that its client left."""
        if event.reason == "cancelled" and not self.stopped:
            return None
        self._piece.text += self._text.finish()
        if event.error is not None:
            return self.failed()
        self._piece.finish = _finish(event, stopped=self.stopped)
        return self._take()

    def failed(self) -> Piece:
        """The last piece of a response that can't go on."""
        self._piece.error = "the response could not be generated; the server's log says why"
        return self._take()

    def _take(self) -> Piece:
        piece, self._piece = self._piece, Piece(self._piece.row)
        return piece


def _finish(event: Ended, *, stopped: bool) -> Finish:
    return "stop" if stopped or event.reason == "stop" else "length"
