"""Continuous batching: every running sequence has a slot, a slot that is free is refilled at once.

Prompts are read apart from decoding, several of them laid end to end, through the attention that
training uses; a long one in pieces. Decoding takes one token of all running sequences at once.
Dimension names: B running sequences, N tokens of one forward pass, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from inference.engine.cache import Continuation, NextToken, SlotCache
from inference.engine.decoder import Decoder
from inference.engine.requests import Ticket
from inference.engine.waiting import Waiting
from inference.tp_group import tp_group_of
from pipeline.kernels.choice import kernel_mode
from pipeline.kernels.linear.rows import fewest_rows
from pipeline.models.attention import Layout, Ragged, round_up
from pipeline.models.forward import base_model

PREFILL = 2048
"""Prompt tokens of one forward pass: more make it no faster, and cost memory."""


class Modules:
    """A model that stores into a cache of slots."""

    def __init__(self, model: nn.Module, cache: SlotCache, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        # transformers hands a 4-D mask through untouched; the layouts need none.
        self._no_mask = torch.ones(1, 1, 1, 1, device=device)

    def __call__(
        self,
        inputs: Int[Tensor, "3 N"],
        layout: Layout,
        *,
        reads_slots: bool = True,
        keep: int | Int[Tensor, " K"] = 0,
    ) -> Float[Tensor, "K V"]:
        """The logits after the tokens `keep`, or after all, of one forward pass.

        Args:
            inputs: tokens, their positions and their places in the cache.
            layout: what each of them sees.
            reads_slots: see `SlotCache.begin`.
            keep: indices of tokens; 0 is all of them.
        """
        self.cache.begin(inputs[2], reads_slots=reads_slots)
        output = self.model(
            input_ids=inputs[:1],
            position_ids=inputs[1:2],
            attention_mask=self._no_mask,
            past_key_values=self.cache,
            use_cache=True,
            ragged=layout,
            logits_to_keep=keep,
        )
        return output.logits[0]


class Slots:
    """The running sequences of a model, at most `num_slots`, and what their slots hold."""

    def __init__(self, model: nn.Module, *, num_slots: int, capacity: int) -> None:
        self.device = next(model.parameters()).device
        self.occupants: list[Ticket | None] = [None] * num_slots
        self.held: list[tuple[int, ...] | None] = [None] * num_slots
        """The prompt whose keys and values are still at the beginning of each slot."""
        self.cache = SlotCache(num_slots=num_slots, capacity=capacity)
        self._spare = self.cache.width - 1
        """Where padding is stored: the end of slot 0, which nobody reads."""
        plain = base_model(model)
        self._fewest = fewest_rows(plain.dtype) if self.device.type == "cpu" else 1
        """Rows of a pass, as those of training have many, and are rounded so."""
        # No part of this refers back to it: what a pass keeps goes when the slots do.
        self._modules = Modules(model, self.cache, self.device)
        self._decode = Decoder(
            self._modules,
            dtype=plain.dtype,
            device=self.device,
            replays=tp_group_of(plain).size == 1 and not has_hooks(model),
        )
        self._after: dict[tuple[int, ...], Float[Tensor, " V"]] = {}
        """Logits after prompts that more samples are still to come of."""

    @property
    def running(self) -> list[Ticket]:
        """The sequences that go on, in the order of their slots."""
        return [each for each in self.occupants if each is not None and each.response.ids]

    def free(self, tickets: Sequence[Ticket]) -> None:
        """Give back the slots of sequences that ended."""
        for ticket in tickets:
            slot = next(slot for slot, each in enumerate(self.occupants) if each is ticket)
            self.occupants[slot] = None
            if not is_running(ticket):
                self.held[slot] = None  # perhaps not all of its prompt was read

    def take(self, waiting: Waiting, *, interleaved: bool) -> list[Ticket]:
        """As many of the waiting as there are free slots, oldest first.

        With `interleaved` only as many as one pass reads, or one alone whose prompt is longer.
        """
        tickets = waiting.oldest(self.occupants.count(None))
        if interleaved and tickets:
            # While others go on, slots that are read into stay behind theirs.
            self._close_gaps()
            ends = accumulate(len(ticket.request.prompt) for ticket in tickets)
            fitting = sum(end <= PREFILL for end in ends)
            tickets = tickets[: max(1, fitting)]
        for ticket in tickets:
            waiting.remove(ticket)
        return tickets

    def start(
        self, tickets: Sequence[Ticket], waiting: Waiting
    ) -> Iterator[Float[Tensor, "B V"] | None]:
        """Read the prompts into free slots, equal ones once.

        Yields None between two passes, at last the logits of the first tokens.
        """
        unread: dict[tuple[int, ...], int] = {}
        copies: list[tuple[int, int]] = []
        # Neighbours of similar length share attention calls.
        by_length = sorted(tickets, key=lambda ticket: len(ticket.request.prompt))
        for ticket in sorted(by_length, key=lambda ticket: not self._in_free_slot(ticket)):
            prompt = ticket.request.prompt
            slot = self._free_slot(prompt)
            if prompt in unread:
                copies.append((unread[prompt], slot))
            elif prompt not in self._after or prompt not in self.held:
                unread[prompt] = slot
            elif self.held[slot] != prompt:
                copies.append((self.held.index(prompt), slot))
            self.occupants[slot] = ticket
            self.held[slot] = prompt
        yield from self._read(unread)
        for source, target in copies:
            self.cache.copy(source, target, len(self.held[target] or ()))
        logits = torch.stack([self._after[ticket.request.prompt] for ticket in tickets])
        self._after = {
            prompt: row for prompt, row in self._after.items() if waiting.has_prompt(prompt)
        }
        yield logits

    def _in_free_slot(self, ticket: Ticket) -> bool:
        places = zip(self.held, self.occupants, strict=True)
        return any(held == ticket.request.prompt and each is None for held, each in places)

    def _free_slot(self, prompt: tuple[int, ...]) -> int:
        """A free slot, one that holds the prompt if there is one."""
        free = [slot for slot, each in enumerate(self.occupants) if each is None]
        return next((slot for slot in free if self.held[slot] == prompt), free[0])

    def _read(self, prompts: dict[tuple[int, ...], int]) -> Iterator[None]:
        """Store prompts in their slots and keep the logits after each; pauses between passes."""
        for number, part in enumerate(packed(list(prompts))):
            slots = [prompts[prompt] for prompt in part]
            if number:
                yield
            # Only a prompt that is alone can be longer than one pass.
            *beginnings, last = range(0, len(part[0]), PREFILL)
            for first in beginnings:
                self._read_pieces([part[0][first : first + PREFILL]], slots, first=first)
                yield
            logits = self._read_pieces([prompt[last:] for prompt in part], slots, first=last)
            self._after.update(zip(part, logits, strict=True))

    @torch.inference_mode()
    def _read_pieces(
        self, pieces: Sequence[tuple[int, ...]], slots: Sequence[int], *, first: int
    ) -> Float[Tensor, "B V"]:
        """Store pieces of prompts from position `first` on; the logits after each."""
        lengths = [len(piece) for piece in pieces]
        tokens = [token for piece in pieces for token in piece]
        positions = [first + place for length in lengths for place in range(length)]
        starts = [slot * self.cache.width for slot in slots]
        places = [
            start + first + place
            for start, length in zip(starts, lengths, strict=True)
            for place in range(length)
        ]
        # Padding goes on from the last piece, whose tokens don't see what comes after them.
        padding = round_up(len(tokens), self._fewest) - len(tokens)
        layout = (
            Continuation(slots[0], first, lengths[0])
            if first
            else Ragged([*lengths[:-1], lengths[-1] + padding], self.device, kernels=kernel_mode())
        )
        ends = torch.tensor(lengths).cumsum(0) - 1
        # Logits of as many tokens as there are rows in a pass at least, for the same reason.
        again = max(0, self._fewest - len(ends))
        last = torch.cat([ends, ends[-1:].expand(again)]).to(self.device)
        inputs = torch.tensor(
            [
                tokens + [tokens[-1]] * padding,
                positions + [0] * padding,
                places + [self._spare] * padding,
            ],
            device=self.device,
        )
        logits = self._modules(inputs, layout, reads_slots=first > 0, keep=last)
        return logits[: len(lengths)]

    @torch.inference_mode()
    def step(self) -> tuple[Sequence[Ticket], Float[Tensor, "B V"]]:
        """Read the newest token of every sequence; the logits of the next ones."""
        self._close_gaps()
        running = self.running
        lengths = [len(each.request.prompt) + len(each.response.ids) for each in running]
        columns = [
            (each.newest, length - 1, slot * self.cache.width + length - 1)
            for slot, (each, length) in enumerate(zip(running, lengths, strict=True))
        ]
        return running, self._decode(columns, NextToken(lengths, self.device), spare=self._spare)

    def _close_gaps(self) -> None:
        """Move the last sequences into slots that stayed free, so that the first slots are live."""
        count = len(self.running)
        gaps = [slot for slot in range(count) if self.occupants[slot] is None]
        late = [
            slot for slot, each in enumerate(self.occupants) if slot >= count and is_running(each)
        ]
        for target, source in zip(gaps, late, strict=True):
            ticket = self.occupants[source]
            assert ticket is not None
            prompt = ticket.request.prompt
            self.cache.copy(source, target, len(prompt) + len(ticket.response.ids) - 1)
            self.occupants[target], self.occupants[source] = ticket, None
            self.held[target] = prompt


def is_running(ticket: Ticket | None) -> bool:
    """Whether its prompt is read and its first token chosen."""
    return ticket is not None and len(ticket.response.ids) > 0


def has_hooks(model: nn.Module) -> bool:
    """Whether somebody wants to be called when its modules are."""
    return any(
        each._forward_hooks or each._forward_pre_hooks  # noqa: SLF001
        for each in model.modules()
    )


def packed(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Cut prompts into parts of at most PREFILL tokens; a longer prompt is alone."""
    parts: list[list[tuple[int, ...]]] = []
    room = 0
    for prompt in prompts:
        if parts and len(prompt) <= room:
            parts[-1].append(prompt)
            room -= len(prompt)
        else:
            parts.append([prompt])
            room = PREFILL - len(prompt)
    return parts
