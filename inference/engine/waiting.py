"""Requests that wait for a slot, oldest first."""

from collections import Counter, OrderedDict
from collections.abc import Hashable
from itertools import islice

from inference.engine.requests import Ticket


class Waiting:
    """Tickets in the order in which they came; any of them can leave."""

    def __init__(self) -> None:
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()
        self._prompts: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def add(self, ticket: Ticket) -> None:
        """Come last."""
        self._tickets[ticket] = None
        self._prompts[ticket.identity] += 1

    def remove(self, ticket: Ticket) -> None:
        """Leave, from wherever it is."""
        del self._tickets[ticket]
        prompt = ticket.identity
        self._prompts[prompt] -= 1
        if not self._prompts[prompt]:
            del self._prompts[prompt]

    def oldest(self, count: int) -> list[Ticket]:
        """The first that many, or all there are."""
        return list(islice(self._tickets, count))

    def has_prompt(self, prompt: Hashable) -> bool:
        """Whether a response to the prompt of this identity is still to come."""
        return prompt in self._prompts
