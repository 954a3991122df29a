"""What the web asks of the generation thread, and the pieces of responses that come back."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from inference.engine.requests import Reported
from inference.engine.sampling import Sampler

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
