"""Continuous batching: every running sequence has a slot, a slot that is free is refilled at once.

Prompts are read apart from decoding, several of them laid end to end, through the attention that
training uses; a long one in pieces. Decoding takes one token of all running sequences at once.
Dimension names: B running sequences, N tokens of one forward pass, V vocabulary.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from inference.engine.cache import NextToken, SlotCache
from inference.engine.decoder import Decoder, has_adapters
from inference.engine.held import LEAST, Slot, as_array, common_prefix
from inference.engine.modules import Modules
from inference.engine.pieces import NextTokenAndPieces, Piece, Pieces, share_out
from inference.engine.repeatable import replays_passes
from inference.engine.replay import Column, PassCounts
from inference.engine.requests import Ticket, Waiting
from inference.engine.row_adapters import RowAdapters
from inference.tp_group import tp_group_of
from pipeline.kernels.choice import kernel_mode
from pipeline.models.attention import Ragged
from pipeline.models.forward import base_model

PREFILL = 2048
"""Prompt tokens of one forward pass: more make it no faster, and cost memory."""


@dataclass(eq=False)
class Reading:
    """A prompt that is being read."""

    tickets: list[Ticket]
    """Who waits for it; their prompts are equal."""

    slot: Slot
    """The place in the cache that the prompt is read into, of one of the tickets."""

    @property
    def identity(self) -> Hashable:
        """The prompt and its sharers: requests with an equal one wait for the same reading."""
        return self.tickets[0].identity

    @property
    def left(self) -> int:
        """Tokens that are still to be read."""
        return len(self.tickets[0].request.prompt) - self.slot.stored


Part = tuple[Reading, int]
"""A prompt, and how many of its tokens a pass reads."""


class Slots:
    """The running sequences of a model, at most `num_slots`, and what their slots hold.

    Args:
        model: a causal language model, plain or with adapters.
        num_slots: sequences that run at once.
        capacity: most tokens of a sequence, prompt and response.
        reuses: whether a prompt that begins as a sequence in a slot is read from where they part;
            else equal prompts alone are read once.
        passes: where decoding passes are counted.
        adapters: those that the model's layers have.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_slots: int,
        capacity: int,
        reuses: bool,
        passes: PassCounts,
        adapters: RowAdapters | None = None,
    ) -> None:
        self.device = next(model.parameters()).device
        self.slots = [Slot() for _ in range(num_slots)]
        self.cache = SlotCache(num_slots=num_slots, capacity=capacity)
        self._reuses = reuses
        self._spare = self.cache.width - 1
        """Where padding is stored: the end of slot 0, which nobody reads."""
        plain = base_model(model)
        # No part of this refers back to it: what a pass keeps goes when the slots do.
        self._modules = Modules(model, self.cache, self.device, adapters)
        tp_group = tp_group_of(plain)
        self._decode = Decoder(
            self._modules,
            dtype=plain.dtype,
            device=self.device,
            replays=replays_passes(model, tp_group, self.device),
            counts=passes,
            agree=lambda own: own if tp_group.size == 1 else not any(tp_group.sums([not own])),
        )
        self._readings: list[Reading] = []
        self._ready: list[Ticket] = []
        """Tickets whose prompts were there, with the logits after them."""
        self._after: dict[Hashable, Float[Tensor, " V"]] = {}
        """Logits after prompts that more samples are still to come of."""
        self._clock = 0
        self.tokens_read = 0
        """Of prompts, until now."""

    @property
    def running(self) -> list[Ticket]:
        """The sequences that go on, in the order of their slots."""
        return [ticket for slot in self.slots if slot.is_running and (ticket := slot.ticket)]

    @property
    def occupants(self) -> list[Ticket]:
        """All sequences that have a slot."""
        return [slot.ticket for slot in self.slots if slot.ticket is not None]

    @property
    def reads(self) -> bool:
        """Whether a prompt is still to be read."""
        return bool(self._readings or self._ready)

    @property
    def has_ready(self) -> bool:
        """Whether prompts were there whole, whose first tokens are to be chosen."""
        return bool(self._ready)

    @property
    def num_reading(self) -> int:
        """Prompts of which tokens are still to be read; equal ones count once."""
        return len(self._readings)

    def fits_step(self, chunk: int) -> bool:
        """Whether so many tokens of prompts go with a decoding step into one pass."""
        return self._decode.replays_rows(len(self.running) + chunk)

    def free(self, tickets: Sequence[Ticket]) -> None:
        """Give back the slots of sequences that ended, or whose prompts are read no further."""
        for ticket in tickets:
            slot = next(slot for slot in self.slots if slot.ticket is ticket)
            if slot.is_running and self._reuses:
                slot.stored = slot.length
                slot.tokens = as_array(ticket.tokens[:-1])
            elif not slot.is_running:
                self._ready = [each for each in self._ready if each is not ticket]
                self._readings = [
                    each for each in self._readings if self._goes_on(each, without=ticket)
                ]
            slot.ticket = None
            self._clock += 1
            slot.used = self._clock

    def _goes_on(self, reading: "Reading", *, without: Ticket) -> bool:
        """Whether somebody else waits for a prompt, to whose slot it then goes."""
        if without in reading.tickets:
            reading.tickets.remove(without)
            if reading.tickets and reading.slot.ticket is without:
                heir = next(slot for slot in self.slots if slot.ticket is reading.tickets[0])
                self._copy(reading.slot, heir, reading.slot.stored)
                reading.slot = heir
        return bool(reading.tickets)

    def admit(self, waiting: Waiting) -> None:
        """Give free slots to the waiting, oldest first."""
        # While others go on, slots that are read into stay behind theirs.
        self._close_gaps()
        tickets: list[Ticket] = []
        for ticket in waiting.oldest(sum(slot.ticket is None for slot in self.slots)):
            if not self._comes_soon(ticket, tickets):
                waiting.remove(ticket)
                tickets.append(ticket)
        # Neighbours of similar length share attention calls. What is held goes to whom it serves,
        # before others take its slot.
        by_length = sorted(tickets, key=lambda ticket: len(ticket.prompt))
        for ticket in sorted(by_length, key=lambda ticket: -self._longest(ticket)[1]):
            self._place(ticket)
        order = {ticket: number for number, ticket in enumerate(tickets)}
        self._readings.sort(key=lambda reading: order.get(reading.tickets[0], -1))

    def _comes_soon(self, ticket: Ticket, before: Sequence[Ticket]) -> bool:
        """Whether more of a prompt than is held is being read for another one."""
        if not self._reuses:
            return False
        others = [*(reading.tickets[0] for reading in self._readings), *before]
        shared = [
            common_prefix(each.prompt, ticket.prompt[:-1])
            for each in others
            if each.request.sharers == ticket.request.sharers and each.identity != ticket.identity
        ]
        return bool(shared) and max(shared) >= self._longest(ticket)[1] + LEAST

    def _longest(self, ticket: Ticket) -> tuple[Slot | None, int]:
        """The slot that holds most of the beginning of a prompt, and how many tokens."""
        is_known = ticket.identity in self._after  # else its last token is read for the logits
        if not (self._reuses or is_known):
            return None, 0
        prompt = ticket.prompt if is_known else ticket.prompt[:-1]
        counts = [slot.common(ticket.request.sharers, prompt) for slot in self.slots]
        # Of equals a free one is there to be taken.
        best = max(
            zip(counts, self.slots, strict=True), key=lambda each: (each[0], not each[1].ticket)
        )
        if is_known and best[0] == len(prompt):
            return best[1], best[0]
        count = min(best[0], len(ticket.prompt) - 1)
        return (best[1], count) if self._reuses and count >= LEAST else (None, 0)

    def _place(self, ticket: Ticket) -> None:
        """Give a ticket a slot, with what is held of its prompt."""
        for reading in self._readings:
            if reading.identity == ticket.identity:
                self._oldest_free().give(ticket, stored=0)
                reading.tickets.append(ticket)
                ticket.num_reused = reading.tickets[0].num_reused
                return
        source, count = self._longest(ticket)
        if source is not None and source.ticket is None and 2 * count >= source.stored:
            slot = source
        else:
            slot = self._oldest_free(besides=source)
        if source is not None and slot is not source:
            self._copy(source, slot, count)
        slot.give(ticket, stored=count)
        ticket.num_reused = count
        if count == len(ticket.prompt):
            self._ready.append(ticket)
        else:
            self._readings.append(Reading([ticket], slot))

    def _oldest_free(self, besides: Slot | None = None) -> Slot:
        """The free slot that was given back first, another one than `besides` if there is one."""
        free = [slot for slot in self.slots if slot.ticket is None]
        return min(free, key=lambda slot: (slot is besides, slot.used if self._reuses else 0))

    def _copy(self, source: Slot, target: Slot, count: int) -> None:
        self.cache.copy(self.slots.index(source), self.slots.index(target), count)
        target.stored = count

    def read(
        self, waiting: Waiting, *, chunk: int, to_the_end: bool
    ) -> tuple[list[Ticket], Float[Tensor, "B V"] | None]:
        """One pass over prompts, or all passes: those that are read, and the logits after them.

        A pass reads at most `chunk` tokens; with 0 there is none, for those that were there.
        """
        tickets, self._ready = self._ready, []
        while self._readings and chunk:
            parts = self._parts(chunk)
            tickets += self._record_read(parts, self._read_pieces(parts))
            if not to_the_end:
                break
        return tickets, self._take_logits(tickets, waiting)

    def _take_logits(
        self, tickets: Sequence[Ticket], waiting: Waiting
    ) -> Float[Tensor, "B V"] | None:
        """The logits after prompts that were read; kept for more samples of them."""
        logits = [self._after[ticket.identity] for ticket in tickets]
        self._after = {name: row for name, row in self._after.items() if waiting.has_prompt(name)}
        return torch.stack(logits) if logits else None

    def _parts(self, chunk: int) -> list[Part]:
        """What a pass over so many tokens reads of the prompts."""
        counts = share_out([each.left for each in self._readings], chunk)
        return [each for each in zip(self._readings, counts, strict=True) if each[1]]

    def _record_read(self, parts: Sequence[Part], logits: Float[Tensor, "B V"]) -> list[Ticket]:
        """Note what a pass has read, with the logits after it; the tickets whose prompts are read.

        The logits of prompts that are not at their end are looked at by nobody.
        """
        found: list[Ticket] = []
        for (reading, count), row in zip(parts, logits, strict=True):
            reading.slot.stored += count
            self.tokens_read += count
            if reading.left:
                continue
            self._after[reading.identity] = row
            self._readings.remove(reading)
            found += reading.tickets
            for slot in [each for each in self.slots if each.ticket in reading.tickets]:
                if slot is not reading.slot:
                    self._copy(reading.slot, slot, reading.slot.stored)
        return found

    @torch.inference_mode()
    def _read_pieces(self, parts: Sequence[Part]) -> Float[Tensor, "B V"]:
        """Read so many more tokens of each prompt; the logits after each."""
        pieces, columns = self._pieces(parts)
        continues = any(piece.first for piece in pieces)
        lengths = [piece.length for piece in pieces]
        layout = (
            Pieces(pieces) if continues else Ragged(lengths, self.device, kernels=kernel_mode())
        )
        last = (torch.tensor(lengths).cumsum(0) - 1).to(self.device)
        inputs = torch.tensor(columns).T.contiguous().to(self.device)
        self._modules.has_adapters = has_adapters(columns)
        return self._modules(inputs, layout, reads_slots=continues, keep=last)

    def _pieces(self, parts: Sequence[Part]) -> tuple[list[Piece], list[Column]]:
        """Where the tokens of a pass lie in their prompts, and what it is given of each."""
        pieces: list[Piece] = []
        columns: list[Column] = []
        for reading, count in parts:
            request = reading.tickets[0].request
            piece = Piece(self.slots.index(reading.slot), reading.slot.stored, count)
            start, last = piece.slot * self.cache.width, piece.first + count
            pieces.append(piece)
            columns += [
                (request.prompt[position], position, start + position, request.adapter)
                for position in range(piece.first, last)
            ]
        return pieces, columns

    @torch.inference_mode()
    def step(
        self, waiting: Waiting, *, chunk: int = 0
    ) -> tuple[Sequence[Ticket], Float[Tensor, "B V"]]:
        """Read the newest token of every sequence, and beside them so many tokens of prompts.

        The sequences, then those whose prompts are read, and the logits of their next tokens.
        """
        self._close_gaps()
        running = self.running
        lengths = [len(each.request.prompt) + len(each.response.ids) for each in running]
        columns = [
            (each.newest, length - 1, slot * self.cache.width + length - 1, each.request.adapter)
            for slot, (each, length) in enumerate(zip(running, lengths, strict=True))
        ]
        layout = NextToken(lengths, self.device)
        parts = self._parts(chunk) if chunk else []
        if not parts:
            self._modules.has_adapters = has_adapters(columns)
            return running, self._decode(columns, layout, spare=self._spare)
        pieces, others = self._pieces(parts)
        columns += others
        self._modules.has_adapters = has_adapters(columns)
        is_end = any(reading.left == count for reading, count in parts)
        layout = NextTokenAndPieces(layout, Pieces(pieces), reads_pieces=is_end)
        logits = self._decode(columns, layout, spare=self._spare)
        ends = len(running) - 1 + torch.tensor([piece.length for piece in pieces]).cumsum(0)
        read = self._record_read(parts, logits[ends.to(self.device)])
        after = self._take_logits(read, waiting)
        logits = logits[: len(running)]
        return [*running, *read], logits if after is None else torch.cat([logits, after])

    def _close_gaps(self) -> None:
        """Have the running sequences lie in the first slots."""
        count = sum(slot.is_running for slot in self.slots)
        gaps = [place for place in range(count) if not self.slots[place].is_running]
        late = [place for place in range(count, len(self.slots)) if self.slots[place].is_running]
        for gap, place in zip(gaps, late, strict=True):
            empty, full = self.slots[gap], self.slots[place]
            if empty.ticket is None and not self._reuses:
                empty.stored = 0
            self.cache.swap((gap, place), (empty.length, full.length))
            self.slots[gap], self.slots[place] = full, empty
