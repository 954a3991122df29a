"""Which sequence has which slot: admission, prefix reuse, and the prompts of the next pass."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from jaxtyping import Int

from inference.engine.cache import SlotCache
from inference.engine.requests import Ticket, Waiting, as_array

REUSE_MIN = 16
"""Shorter prefixes are read again: that costs less than copying them."""

GROUP_TOKENS = 1024
"""Prompt tokens for which a closed batch interrupts decoding."""


@dataclass(eq=False)
class Slot:
    """A slot of the cache, and the sequence whose keys and values it stores.

    Prefill reads a prompt up to its last token. The first decoding pass reads that one, so a
    sequence is running as soon as the rest of its prompt is stored.
    """

    index: int

    ticket: Ticket | None = None
    """The request that occupies the slot; None if it is free."""

    tokens: Int[np.ndarray, " P"] = field(default_factory=lambda: as_array(()))
    """The stored sequence; of a running request its prompt."""

    stored: int = 0
    """Length of the prefix of `tokens` whose keys and values are stored."""

    identity: Hashable = None
    """`Ticket.identity` of the last request."""

    scope: Hashable = None
    """`Request.scope` of the last request."""

    freed_at: int = 0

    @property
    def left(self) -> int:
        """Prompt tokens that prefill has still to read."""
        return 0 if self.ticket is None else len(self.ticket.prompt) - 1 - self.stored

    @property
    def is_running(self) -> bool:
        """Whether the next decoding pass takes a token of it."""
        return self.ticket is not None and self.left <= 0

    @property
    def length(self) -> int:
        """Stored tokens."""
        if self.ticket is None or not self.is_running:
            return self.stored
        return len(self.ticket.prompt) + len(self.ticket.response.ids) - 1

    def assign(self, ticket: Ticket, *, stored: int) -> None:
        """Give the slot, which stores the first `stored` tokens of the prompt, to a request."""
        self.ticket, self.tokens, self.stored = ticket, ticket.prompt, stored
        self.identity, self.scope = ticket.identity, ticket.request.scope
        ticket.num_reused = stored


class PrefixCache:
    """Finds the slot that stores the longest prefix of a prompt.

    Args:
        slots: of the cache.
        partial: whether any common prefix counts; otherwise only equal prompts share.
    """

    def __init__(self, slots: Sequence[Slot], *, partial: bool) -> None:
        self._slots = slots
        self._partial = partial
        self._by_identity: dict[Hashable, Slot] = {}

    def assign(self, slot: Slot, ticket: Ticket, *, stored: int) -> None:
        """Give a slot to a request, and forget the sequence it stored."""
        if self._by_identity.get(slot.identity) is slot:
            del self._by_identity[slot.identity]
        slot.assign(ticket, stored=stored)
        self._by_identity[ticket.identity] = slot

    def free(self, slot: Slot) -> None:
        """Take a slot from its request; its sequence remains until the slot is needed."""
        if slot.is_running and self._partial:
            assert slot.ticket is not None
            slot.tokens = as_array(slot.ticket.tokens[:-1])
            slot.stored = len(slot.tokens)
        slot.ticket = None

    def find(self, ticket: Ticket) -> tuple[Slot | None, int]:
        """Return the slot with the longest reusable prefix, and the length of that prefix."""
        prompt = ticket.prompt[:-1]
        equal = self._by_identity.get(ticket.identity)
        if equal is not None and equal.stored >= len(prompt):
            return (equal, len(prompt)) if len(prompt) else (None, 0)
        if not self._partial:
            return None, 0
        counts = [
            (common_prefix(slot.tokens[: slot.stored], prompt), slot.ticket is None, slot.index)
            for slot in self._slots
            if slot.scope == ticket.request.scope
        ]
        count, _, index = max(counts, default=(0, False, 0))
        return (self._slots[index], count) if count >= REUSE_MIN else (None, 0)

    def is_pending(self, ticket: Ticket, admitted: Sequence[Ticket]) -> bool:
        """Whether a prompt that is being read will provide a longer prefix than is stored."""
        count = self.find(ticket)[1]
        if count == len(ticket.prompt) - 1:
            return False
        reading = [slot.ticket for slot in self._slots if slot.ticket is not None and slot.left > 0]
        others = [*reading, *admitted]
        if not self._partial:
            return any(other.identity == ticket.identity for other in others)
        shared = [
            common_prefix(other.prompt, ticket.prompt[:-1])
            for other in others
            if other.request.scope == ticket.request.scope
        ]
        return max(shared, default=0) >= count + REUSE_MIN


class Scheduler:
    """Assigns slots to requests, and chooses the prompt tokens of the next prefill pass.

    Args:
        cache: the keys and values.
        reuses: whether prompts reuse any common prefix, rather than that of equal prompts only.
    """

    def __init__(self, cache: SlotCache, *, reuses: bool) -> None:
        self.slots = [Slot(index) for index in range(cache.num_slots)]
        self._cache = cache
        self._prefixes = PrefixCache(self.slots, partial=reuses)
        self._reading: list[Slot] = []
        """Slots whose prompts are being read, in the order of their admission."""
        self._clock = 0

    @property
    def running(self) -> list[Ticket]:
        """The requests of the next decoding pass, in the order of their slots."""
        return [slot.ticket for slot in self.slots if slot.ticket is not None and slot.is_running]

    @property
    def occupants(self) -> list[Ticket]:
        """All requests that have a slot."""
        return [slot.ticket for slot in self.slots if slot.ticket is not None]

    @property
    def is_reading(self) -> bool:
        """Whether prompt tokens are left to read."""
        return bool(self._reading)

    def is_due(self, waiting: Waiting) -> bool:
        """Whether a closed batch interrupts decoding to admit a group of requests.

        It waits until an eighth of the slots is free, or the prompts that fit fill a pass.
        """
        num_free = sum(slot.ticket is None for slot in self.slots)
        if not num_free or not waiting:
            return False
        tokens = sum(len(ticket.prompt) for ticket in islice(waiting, num_free))
        return 8 * num_free >= len(self.slots) or tokens >= GROUP_TOKENS

    def admit(self, waiting: Waiting) -> None:
        """Give free slots to the oldest requests; those with a pending prefix stay in the queue."""
        admitted: list[Ticket] = []
        num_free = sum(slot.ticket is None for slot in self.slots)
        for ticket in list(islice(waiting, num_free)):
            if not self._prefixes.is_pending(ticket, admitted):
                del waiting[ticket]
                admitted.append(ticket)
        # Reuse a stored sequence before its slot is given to another request.
        for ticket in sorted(admitted, key=lambda ticket: -self._prefixes.find(ticket)[1]):
            self._place(ticket)

    def _place(self, ticket: Ticket) -> None:
        """Give a request a slot, with the longest prefix that is stored."""
        source, count = self._prefixes.find(ticket)
        if source is not None and source.ticket is None and 2 * count >= source.stored:
            slot = source
        else:
            free = [slot for slot in self.slots if slot.ticket is None]
            slot = min(free, key=lambda slot: (slot is source, slot.freed_at))
            if source is not None and slot is not source:
                self._cache.copy(source.index, slot.index, count)
        self._prefixes.assign(slot, ticket, stored=count)
        if slot.left:
            self._reading.append(slot)

    def free(self, tickets: Sequence[Ticket]) -> None:
        """Free the slots of requests that ended."""
        ended = set(tickets)
        for slot in self.slots:
            if slot.ticket in ended:
                self._prefixes.free(slot)
                self._clock += 1
                slot.freed_at = self._clock
        self._reading = [slot for slot in self._reading if slot.ticket is not None]

    def next_pieces(self, most: int) -> list[tuple[Slot, int]]:
        """The slots whose prompts the next prefill pass reads, with their numbers of tokens."""
        counts = share_out([slot.left for slot in self._reading], most)
        return [piece for piece in zip(self._reading, counts, strict=True) if piece[1]]

    def record_read(self, pieces: Sequence[tuple[Slot, int]]) -> None:
        """Count the tokens that a prefill pass has stored."""
        for slot, count in pieces:
            slot.stored += count
        self._reading = [slot for slot in self._reading if slot.left]

    def compact(self) -> None:
        """Move the running sequences to the first slots."""
        count = sum(slot.is_running for slot in self.slots)
        gaps = [slot for slot in self.slots[:count] if not slot.is_running]
        late = [slot for slot in self.slots[count:] if slot.is_running]
        for gap, slot in zip(gaps, late, strict=True):
            self._cache.swap((gap.index, slot.index), (gap.length, slot.length))
            gap.index, slot.index = slot.index, gap.index
            self.slots[gap.index], self.slots[slot.index] = gap, slot


def common_prefix(one: Int[np.ndarray, " P"], other: Int[np.ndarray, " Q"]) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    return int(differ.argmax()) if differ.any() else count


def share_out(left: Sequence[int], most: int) -> list[int]:
    """Divide `most` tokens of a pass among prompts with `left` tokens each.

    The oldest prompt is read to its end, or takes at least half of the pass if it is longer. The
    others follow whole, the shortest first, so that short prompts don't wait for a long one.
    """
    counts = [0] * len(left)
    counts[0] = left[0] if left[0] <= most else most // 2 if len(left) > 1 else most
    room = most - counts[0]
    for index in sorted(range(1, len(left)), key=left.__getitem__):
        if left[index] > room:
            break
        counts[index] = left[index]
        room -= left[index]
    counts[0] += min(room, left[0] - counts[0])
    return counts
