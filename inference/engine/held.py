"""What slots hold: the keys and values of a sequence, also when it has ended.

A prompt that begins like one of them is read from where they part.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from inference.engine.requests import Ticket, as_array

LEAST = 16
"""Fewer tokens than these are read again: they cost less than a copy and a piece of their own."""


@dataclass(eq=False)
class Slot:
    """A place in the cache, and what is at its beginning."""

    ticket: Ticket | None = None
    """The request whose response runs in it; None where the place is free."""

    tokens: Int[np.ndarray, " P"] = field(default_factory=lambda: as_array(()))
    """A sequence of which keys and values are there: of a running one its prompt."""

    stored: int = 0
    """How many of `tokens`, from the first, have keys and values there."""

    sharers: Hashable = None
    """Who may use them (`Request.sharers`)."""

    used: int = 0
    """When it was last somebody's, by a counter."""

    @property
    def is_running(self) -> bool:
        """Whether its prompt is read and its first token chosen."""
        return self.ticket is not None and len(self.ticket.response.ids) > 0

    @property
    def length(self) -> int:
        """Tokens whose keys and values are there; a running sequence's newest has none yet."""
        ticket = self.ticket
        if ticket is None or not ticket.response.ids:
            return self.stored
        return len(ticket.request.prompt) + len(ticket.response.ids) - 1

    def give(self, ticket: Ticket, *, stored: int) -> None:
        """Its first `stored` tokens are those of the ticket's prompt."""
        self.ticket, self.tokens = ticket, ticket.prompt
        self.stored, self.sharers = stored, ticket.request.sharers

    def common(self, sharers: Hashable, tokens: Int[np.ndarray, " P"]) -> int:
        """How many stored tokens `tokens` begins with; 0 for requests that don't share with it."""
        if sharers != self.sharers:
            return 0
        return common_prefix(self.tokens[: self.stored], tokens)


def common_prefix(one: Int[np.ndarray, " P"], other: Int[np.ndarray, " Q"]) -> int:
    """With how many equal tokens two sequences begin."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    return int(differ.argmax()) if differ.any() else count
