"""Continuous batching: sequences have slots, and free slots are refilled while others run."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from inference.engine.ahead import Ahead, can_stay_ahead
from inference.engine.cache import NextToken, Piece, Pieces, SlotCache
from inference.engine.decoder import Decoder
from inference.engine.replay import Column, CurrentLayout, PassCounts
from inference.engine.requests import Ticket, Waiting, as_array
from inference.tensor_parallel import get_tp_group
from pipeline.kernels.choice import kernel_mode
from pipeline.kernels.linear import LinearByKernel
from pipeline.models.forward.attention import Layout, Ragged
from pipeline.models.forward.forward import base_model, cache_name

REUSE_MIN = 16
"""Minimum length of a copied prefix: recomputing a shorter one is cheaper."""

GROUP_TOKENS = 1024
"""Prompt tokens that must wait before a closed batch interrupts decoding."""


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
    """The stored sequence, or the prompt of a running request."""

    stored: int = 0
    """Length of the prefix of `tokens` whose keys and values are stored."""

    identity: Hashable = None
    """`Ticket.identity` of the last request."""

    scope: Hashable = None
    """`Request.scope` of the last request."""

    freed_at: int = 0

    @property
    def left(self) -> int:
        """Prompt tokens that prefill has not read yet."""
        return 0 if self.ticket is None else len(self.ticket.prompt) - 1 - self.stored

    @property
    def is_running(self) -> bool:
        """Whether the slot takes part in the next decoding pass."""
        return self.ticket is not None and self.left <= 0

    @property
    def length(self) -> int:
        """Stored tokens."""
        if self.ticket is None or not self.is_running:
            return self.stored
        return len(self.ticket.request.prompt) + len(self.ticket.response.ids) - 1

    def assign(self, ticket: Ticket, *, stored: int) -> None:
        """Assign the slot, which stores the first `stored` tokens of the prompt, to a request."""
        self.ticket, self.tokens, self.stored = ticket, ticket.prompt, stored
        self.identity, self.scope = ticket.identity, ticket.request.scope
        ticket.num_reused = stored


class PrefixCache:
    """Finds the slot that stores the longest prefix of a prompt.

    Args:
        slots: slots of the cache.
        partial: whether any common prefix is reused; otherwise only equal prompts share.
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
        """Return the slot with the longest reusable prefix, and the prefix's length."""
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

    def is_pending(self, ticket: Ticket, reading: Mapping[Hashable, Ticket]) -> bool:
        """Whether a prompt that is being read will provide a longer prefix than is stored.

        Args:
            ticket: a request without a slot.
            reading: requests whose prompts are being read, by their `identity`.
        """
        count = self.find(ticket)[1]
        if count == len(ticket.prompt) - 1:
            return False
        if not self._partial:
            return ticket.identity in reading
        shared = [
            common_prefix(other.prompt, ticket.prompt[:-1])
            for other in reading.values()
            if other.request.scope == ticket.request.scope
        ]
        return max(shared, default=0) >= count + REUSE_MIN


class Scheduler:
    """Assigns slots to requests, and chooses the prompt tokens of the next prefill pass.

    Args:
        cache: the keys and values.
        reuses: whether prompts reuse any common prefix, rather than only equal prompts.
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

    def is_due(self, waiting: Waiting, *, is_closed: bool) -> bool:
        """Whether decoding is interrupted to admit requests or to read the rest of prompts.

        A closed batch waits until an eighth of the slots is free, or prompts that fit fill a pass.
        """
        if self.is_reading or not waiting:
            return self.is_reading
        num_free = sum(slot.ticket is None for slot in self.slots)
        if not num_free or not is_closed:
            return num_free > 0
        tokens = sum(len(ticket.prompt) for ticket in islice(waiting, num_free))
        return 8 * num_free >= len(self.slots) or tokens >= GROUP_TOKENS

    def admit(self, waiting: Waiting) -> None:
        """Give free slots to the oldest requests; those with a pending prefix stay in the queue."""
        free = sorted(
            (slot for slot in self.slots if slot.ticket is None), key=lambda slot: slot.freed_at
        )
        reading = {slot.identity: slot.ticket for slot in self._reading if slot.ticket is not None}
        admitted: list[Ticket] = []
        for ticket in list(islice(waiting, len(free))):
            if not self._prefixes.is_pending(ticket, reading):
                del waiting[ticket]
                admitted.append(ticket)
                reading[ticket.identity] = ticket
        # Reuse stored sequences before their slots are given to other requests.
        for ticket in sorted(admitted, key=lambda ticket: -self._prefixes.find(ticket)[1]):
            self._place(ticket, free)

    def _place(self, ticket: Ticket, free: list[Slot]) -> None:
        """Give a request a slot, the first free one or that of the longest stored prefix."""
        source, count = self._prefixes.find(ticket)
        if source is not None and source.ticket is None and 2 * count >= source.stored:
            slot = source
            free.remove(slot)
        else:
            slot = free.pop(1 if free[0] is source and len(free) > 1 else 0)
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

    def next_pieces(self, most: int, *, splits: bool) -> list[tuple[Slot, int]]:
        """The slots whose prompts the next pass reads, oldest first, with numbers of tokens.

        Without `splits`, the pass reads none but the first of them in part.
        """
        pieces: list[tuple[Slot, int]] = []
        for slot in self._reading:
            count = min(slot.left, most)
            if not count or (pieces and count < slot.left and not splits):
                break
            most -= count
            pieces.append((slot, count))
        return pieces

    def record_read(self, pieces: Sequence[tuple[Slot, int]]) -> None:
        """Count the tokens that a prefill pass has stored."""
        for slot, count in pieces:
            slot.stored += count
        self._reading = [slot for slot in self._reading if slot.left]

    def compact(self) -> None:
        """Move the running sequences to the first slots."""
        runs = [slot.is_running for slot in self.slots]
        count = sum(runs)
        gaps = [self.slots[index] for index in range(count) if not runs[index]]
        late = [self.slots[index] for index in range(count, len(runs)) if runs[index]]
        for gap, slot in zip(gaps, late, strict=True):
            self._cache.swap((gap.index, slot.index), (gap.length, slot.length))
            gap.index, slot.index = slot.index, gap.index
            self.slots[gap.index], self.slots[slot.index] = gap, slot


def common_prefix(one: Int[np.ndarray, " P"], other: Int[np.ndarray, " Q"]) -> int:
    """Number of equal tokens at the beginning of two sequences."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    return int(differ.argmax()) if differ.any() else count


PREFILL = {"cpu": 2048, "cuda": 8192}
"""Prompt tokens of one pass; more would need more memory and not be faster.
`pipeline/budget/memory.py` has the same numbers."""


class SlotModel:
    """Forward passes of a model that stores its keys and values in slots."""

    def __init__(self, model: nn.Module, cache: SlotCache, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._cache_argument = {cache_name(model): cache}
        self._is_cpu = device.type == "cpu"
        # transformers passes a 4-D mask through unchanged; the layouts need none.
        self._no_mask = torch.ones(1, 1, 1, 1, device=device)

    def __call__(
        self, inputs: Int[Tensor, "3 N"], layout: Layout, *, reads_slots: bool = True, keep: int = 0
    ) -> Float[Tensor, "K V"]:
        """Logits after the last `keep` tokens, or after all of them if `keep` is 0.

        Args:
            inputs: tokens, positions and cache indices.
            layout: attention of the pass.
            reads_slots: see `SlotCache.begin`.
            keep: number of tokens.
        """
        self._cache.begin(inputs[2], reads_slots=reads_slots)
        is_recorded = isinstance(layout, CurrentLayout) and layout.recorder is not None
        with LinearByKernel() if self._is_cpu and not is_recorded else nullcontext():
            output = self._model(
                input_ids=inputs[:1],
                position_ids=inputs[1:2],
                attention_mask=self._no_mask,
                use_cache=True,
                ragged=layout,
                logits_to_keep=keep,
                **self._cache_argument,
            )
        return output.logits[0]


class Slots(Scheduler):
    """The running sequences of a model, at most `num_slots`.

    Args:
        model: a causal language model, plain or with adapters.
        num_slots: sequences that run at once.
        capacity: maximum tokens of a sequence, prompt and response.
        reuses: whether prompts reuse any common prefix of the sequences in the slots, rather than
            only equal prompts.
        passes: counts the passes.
    """

    def __init__(
        self, model: nn.Module, *, num_slots: int, capacity: int, reuses: bool, passes: PassCounts
    ) -> None:
        self.device = next(model.parameters()).device
        self.cache = SlotCache(num_slots=num_slots, capacity=capacity)
        super().__init__(self.cache, reuses=reuses)
        self._passes = passes
        self._modules = SlotModel(model, self.cache, self.device)
        tp_group = get_tp_group(base_model(model))
        self._is_alone = tp_group.size == 1
        self._decode = Decoder(
            self._modules,
            model=model,
            device=self.device,
            counts=passes,
            agree=lambda own: own if tp_group.size == 1 else not any(tp_group.sums([not own])),
        )

    def prefill(self, waiting: Waiting, *, chunk: int, is_closed: bool) -> None:
        """Give free slots to the oldest requests, and read at most `chunk` prompt tokens.

        In a closed batch, read all prompts, once enough requests wait for it to pay.
        """
        if self.running and not self.is_due(waiting, is_closed=is_closed):
            return
        self.admit(waiting)
        while self.is_reading:
            self._read(self.next_pieces(chunk, splits=self.device.type == "cpu"))
            if not is_closed:
                return
            if not self.is_reading:
                self.admit(waiting)  # requests that waited for the prefixes just read

    @torch.inference_mode()
    def _read(self, pieces: Sequence[tuple[Slot, int]]) -> None:
        """Store the next tokens of each prompt."""
        layout_pieces: list[Piece] = []
        columns: list[Column] = []
        for slot, count in pieces:
            assert slot.ticket is not None
            start, end = slot.index * self.cache.width, slot.stored + count
            layout_pieces.append(Piece(slot.index, slot.stored, count))
            columns += [
                (token, position, start + position)
                for position, token in enumerate(
                    slot.ticket.prompt[slot.stored : end].tolist(), slot.stored
                )
            ]
        # On a GPU, one call attends to whole prompts, with the keys of the pass itself.
        is_whole = self.device.type != "cpu" and not any(piece.first for piece in layout_pieces)
        layout = (
            Ragged([count for _, count in pieces], self.device, kernels=kernel_mode())
            if is_whole
            else Pieces(layout_pieces)
        )
        inputs = torch.tensor(columns).T.contiguous().to(self.device)
        self._modules(inputs, layout, reads_slots=not is_whole, keep=1)
        self._passes.prefill += 1
        self.record_read(pieces)

    @torch.inference_mode()
    def step(self) -> tuple[list[Ticket], Float[Tensor, "B V"]]:
        """Read the newest token of every running sequence; return the logits of the next ones."""
        self.compact()
        running = self.running
        lengths = [len(ticket.request.prompt) + len(ticket.response.ids) for ticket in running]
        columns = [
            (ticket.newest, length - 1, slot * self.cache.width + length - 1)
            for slot, (ticket, length) in enumerate(zip(running, lengths, strict=True))
        ]
        layout = NextToken(lengths, self.device)
        # The pass that allocates the cache can't be replayed.
        repeats = bool(self.cache.keys)
        return running, self._decode(columns, layout, spare=self.cache.spare, repeats=repeats)

    def go_ahead(self, tickets: Sequence[Ticket], logits: Float[Tensor, "B V"]) -> Ahead | None:
        """Decode these sequences one pass ahead of the host; None if the device can't.

        Args:
            tickets: sequences of the last pass.
            logits: logits of these sequences.
        """
        rows = self._decode.replayed
        if rows is None or not self._is_alone or not can_stay_ahead(tickets):
            return None
        return Ahead(rows, tickets, logits, counts=self._passes)
