"""Continuous batching: sequences have slots, and free slots are refilled while others run.

A sequence takes pages of the cache as it grows. Sequences with a common prefix share the pages that
the prefix fills. When no page is left, the newest sequence is preempted and later recomputed.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from inference.engine.ahead import AheadDecoder, can_decode_ahead, remaining_tokens
from inference.engine.cache import Chunk, ChunkedAttention, DecodeAttention, PagedCache, count_pages
from inference.engine.decoder import Decoder
from inference.engine.replay import CurrentLayout, PassCounts
from inference.engine.requests import Ticket, Waiting, to_array
from inference.tensor_parallel import get_tp_group
from pipeline.kernels.choice import kernel_mode
from pipeline.kernels.decode_attention import PAGE
from pipeline.kernels.linear import LinearKernelMode
from pipeline.models.forward.attention import Layout, Ragged
from pipeline.models.forward.forward import base_model, cache_name

REUSE_MIN = 16
"""Minimum length of a reused prefix; recomputing a shorter one is cheaper."""

GROUP_TOKENS = 1024
"""Number of waiting prompt tokens at which a closed batch interrupts decoding."""


class PagePool:
    """The free pages of a cache, and the number of slots that use each occupied page."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))  # the first page is for padding
        self._uses: Counter[int] = Counter()

    def __len__(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate free pages for one slot."""
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Increment the use count of pages."""
        self._uses.update(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Decrement the use count of pages and free those that are no longer used."""
        self._uses.subtract(pages)
        self._free += [page for page in reversed(pages) if not self._uses[page]]


@dataclass(eq=False)
class Slot:
    """Holds a running sequence, an ended one whose keys and values remain stored, or nothing.

    Prefill processes all tokens of a prompt except the last, which the first decoding pass
    processes. A sequence is therefore running as soon as the rest of its prompt is stored.
    """

    index: int

    ticket: Ticket | None = None
    """The request that occupies the slot; None if it is free."""

    pages: list[int] = field(default_factory=list)
    """Pages of the cache, in the order of the tokens."""

    tokens: Int[np.ndarray, " P"] = field(default_factory=lambda: to_array(()))
    """The stored sequence, or the prompt of a running request."""

    stored: int = 0
    """Length of the prefix of `tokens` whose keys and values are stored."""

    prompt_key: Hashable = None
    """`Ticket.prompt_key` of the last request."""

    scope: Hashable = None
    """`Request.scope` of the last request."""

    changed_at: int = 0
    """Time at which the slot was last assigned or freed."""

    @property
    def num_unread(self) -> int:
        """Number of prompt tokens that prefill has not processed yet."""
        return 0 if self.ticket is None else len(self.ticket.prompt) - 1 - self.stored

    @property
    def is_running(self) -> bool:
        """Whether the slot takes part in the next decoding pass."""
        return self.ticket is not None and self.num_unread <= 0

    @property
    def length(self) -> int:
        """Number of stored tokens."""
        if self.ticket is None or not self.is_running:
            return self.stored
        return len(self.ticket.request.prompt) + len(self.ticket.response.ids) - 1

    @property
    def may_grow(self) -> bool:
        """Whether the request may need another page, and the slot has no spare page."""
        if self.ticket is None:
            return False
        length = len(self.ticket.request.prompt) + len(self.ticket.response.ids)
        return len(self.pages) < min(count_pages(length) + 1, max_pages(self.ticket))

    def assign(self, ticket: Ticket, *, stored: int) -> None:
        """Assign the slot, which stores the first `stored` tokens of the prompt, to a request."""
        self.ticket, self.tokens, self.stored = ticket, ticket.prompt, stored
        self.prompt_key, self.scope = ticket.prompt_key, ticket.request.scope
        ticket.num_reused = stored

    def clear(self) -> None:
        """Empty the slot: remove its request, tokens and pages."""
        self.ticket, self.tokens, self.stored, self.pages = None, to_array(()), 0, []


class PrefixCache:
    """Finds the slot that stores the longest prefix of a prompt.

    Without `allow_partial`, only identical prompts share a prefix.
    """

    def __init__(self, slots: Sequence[Slot], *, allow_partial: bool) -> None:
        self._slots = slots
        self._allow_partial = allow_partial
        self._slot_by_prompt: dict[Hashable, Slot] = {}

    def assign(self, slot: Slot, ticket: Ticket, *, stored: int) -> None:
        """Assign a slot to a request, discarding the sequence it stored."""
        if self._slot_by_prompt.get(slot.prompt_key) is slot:
            del self._slot_by_prompt[slot.prompt_key]
        slot.assign(ticket, stored=stored)
        self._slot_by_prompt[ticket.prompt_key] = slot

    def free(self, slot: Slot) -> None:
        """Free a slot; its sequence remains stored until the slot is needed."""
        if slot.is_running and self._allow_partial:
            assert slot.ticket is not None
            slot.tokens = to_array(slot.ticket.tokens[:-1])
            slot.stored = len(slot.tokens)
        slot.ticket = None

    def find(self, ticket: Ticket) -> tuple[Slot | None, int]:
        """Return the slot with the longest reusable prefix, and the prefix's length."""
        prompt = ticket.prompt[:-1]
        match = self._slot_by_prompt.get(ticket.prompt_key)
        if match is not None and match.stored >= len(prompt):
            return (match, len(prompt)) if len(prompt) else (None, 0)
        if not self._allow_partial:
            return None, 0
        candidates = [
            (common_prefix(slot.tokens[: slot.stored], prompt), slot.ticket is None, slot.index)
            for slot in self._slots
            if slot.scope == ticket.request.scope
        ]
        count, _, index = max(candidates, default=(0, False, 0))
        return (self._slots[index], count) if count >= REUSE_MIN else (None, 0)

    def is_pending(self, ticket: Ticket, prefilling: Mapping[Hashable, Ticket]) -> bool:
        """Return whether a prompt being prefilled will provide a longer prefix than the stored one.

        Args:
            ticket: a request without a slot.
            prefilling: requests whose prompts are being prefilled, by their `prompt_key`.
        """
        count = self.find(ticket)[1]
        if count == len(ticket.prompt) - 1:
            return False
        if not self._allow_partial:
            return ticket.prompt_key in prefilling
        shared = [
            common_prefix(other.prompt, ticket.prompt[:-1])
            for other in prefilling.values()
            if other.request.scope == ticket.request.scope
        ]
        return max(shared, default=0) >= count + REUSE_MIN


class Scheduler:
    """Assigns slots and pages to requests, and chooses the prompt tokens of the next prefill pass.

    Args:
        cache: the keys and values.
        num_slots: number of sequences that run at once.
        capacity: maximum length of a sequence; the cache has pages for at least one of that length.
        reuse: whether prompts reuse any common prefix; otherwise only identical ones share it.
        lookahead: number of additional tokens to reserve pages for, if enough pages are free.
    """

    def __init__(
        self, cache: PagedCache, *, num_slots: int, capacity: int, reuse: bool, lookahead: int = 0
    ) -> None:
        self.slots = [Slot(index) for index in range(num_slots)]
        self.table: Int[np.ndarray, "S L"] = np.zeros((num_slots, count_pages(capacity)), np.int32)
        """Pages of each slot."""
        self._cache = cache
        self._pool = PagePool(cache.num_pages)
        self._lookahead = lookahead
        self._prefixes = PrefixCache(self.slots, allow_partial=reuse)
        self._prefilling: list[Slot] = []
        """Slots whose prompts are being prefilled, in the order of their admission."""
        self._blocked: Ticket | None = None
        """The last request that could not get pages."""
        self._is_blocked = False
        """Whether that request still waits for pages to be released."""
        self._num_fitting = num_slots
        """Number of sequences that have pages if a request is blocked, or else of all slots."""
        self._clock = itertools.count()

    @property
    def running_slots(self) -> list[Slot]:
        """The slots of the next decoding pass."""
        return [slot for slot in self.slots if slot.is_running]

    @property
    def running(self) -> list[Ticket]:
        """The requests of the next decoding pass, in the order of their slots."""
        return [slot.ticket for slot in self.running_slots if slot.ticket is not None]

    @property
    def occupants(self) -> list[Ticket]:
        """All requests that have a slot."""
        return [slot.ticket for slot in self.slots if slot.ticket is not None]

    @property
    def is_prefilling(self) -> bool:
        """Whether any prompt is being prefilled."""
        return bool(self._prefilling)

    def should_prefill(self, waiting: Waiting, *, is_closed: bool) -> bool:
        """Return whether to interrupt decoding in order to admit requests or continue prefill.

        A closed batch waits until an eighth of the slots that have pages are free, or until the
        waiting prompts that fit into the free slots contain `GROUP_TOKENS` tokens.
        """
        if self.is_prefilling or not waiting or (self._is_blocked and self._blocked in waiting):
            return self.is_prefilling
        num_free = sum(slot.ticket is None for slot in self.slots)
        if not num_free or not is_closed:
            return num_free > 0
        num_free = max(0, num_free - len(self.slots) + self._num_fitting)
        tokens = sum(len(ticket.prompt) for ticket in itertools.islice(waiting, num_free))
        return 8 * num_free >= self._num_fitting or tokens >= GROUP_TOKENS

    def admit(self, waiting: Waiting) -> None:
        """Assign free slots to the oldest requests, unless their prefix is being prefilled."""
        free_slots = self._slots_by_age(occupied=False)
        prefilling = {s.prompt_key: s.ticket for s in self._prefilling if s.ticket is not None}
        oldest: list[Ticket] = []
        for ticket in itertools.islice(waiting, len(free_slots)):
            if not self._prefixes.is_pending(ticket, prefilling):
                oldest.append(ticket)
                prefilling[ticket.prompt_key] = ticket
        # Reuse sequences before their slots are reassigned, without overtaking a blocked request.
        if self._blocked not in waiting:
            oldest.sort(key=lambda ticket: -self._prefixes.find(ticket)[1])
        available = self._num_available() - sum(slot.may_grow for slot in self.slots)
        copies: dict[int, int] = {}
        for ticket in oldest:
            source, count = self._prefixes.find(ticket)
            needed = min(count_pages(len(ticket.prompt)) + 1, max_pages(ticket))
            if source is not None and source.ticket is not None:
                needed -= count // PAGE
            self._is_blocked = needed > available
            if self._is_blocked:
                self._blocked = ticket
                break
            available -= needed
            del waiting[ticket]
            self._assign_slot(ticket, source, count, free_slots, copies)
        self._cache.copy(copies)
        self._num_fitting = len(self.occupants) if self._is_blocked else len(self.slots)

    def _assign_slot(
        self,
        ticket: Ticket,
        source: Slot | None,
        count: int,
        free_slots: list[Slot],
        copies: dict[int, int],
    ) -> None:
        """Assign a slot and pages; `source` stores the first `count` tokens of the prompt.

        Pages to copy are added to `copies`, which maps each target to its source.
        """
        if source in free_slots and 2 * count >= source.stored:
            slot = source
            free_slots.remove(slot)
        else:
            slot = free_slots.pop(1 if free_slots[0] is source and len(free_slots) > 1 else 0)
        num_full = count // PAGE
        prefix = [] if source is None else source.pages[: count_pages(count)]
        self._pool.share(prefix[:num_full])
        self._pool.release(slot.pages)
        slot.clear()
        pages = prefix[:num_full] + self._allocate(count_pages(len(ticket.prompt)) - num_full)
        for page in prefix[num_full:]:  # may have been released, but is written after the copy
            copies[pages[num_full]] = copies.get(page, page)
        self._prefixes.assign(slot, ticket, stored=count)
        self._set_pages(slot, pages)
        slot.changed_at = next(self._clock)
        if slot.num_unread:
            self._prefilling.append(slot)

    def grow(self, waiting: Waiting) -> None:
        """Allocate pages for running sequences' next tokens; if necessary, preempt the newest."""
        for slot in self.slots:
            if slot.ticket is None:
                continue
            length = len(slot.ticket.request.prompt) + len(slot.ticket.response.ids)
            if length + self._lookahead <= PAGE * len(slot.pages) or not slot.is_running:
                continue
            needed = count_pages(length) - len(slot.pages)
            while needed > len(self._pool) and needed > self._num_available():
                newest = self._slots_by_age(occupied=True)[-1]
                self._preempt(newest, waiting)
            if slot.ticket is None:
                continue
            target = min(count_pages(length + self._lookahead), max_pages(slot.ticket))
            wanted = target - len(slot.pages)
            count = wanted if wanted <= len(self._pool) else needed
            if count > 0:
                self._set_pages(slot, [*slot.pages, *self._allocate(count)])

    def _preempt(self, slot: Slot, waiting: Waiting) -> None:
        """Return a request to the head of the queue, discarding its keys and values."""
        assert slot.ticket is not None
        slot.ticket.reset_prefill()
        queue = {slot.ticket: None, **waiting}
        waiting.clear()
        waiting.update(queue)
        self._pool.release(slot.pages)
        slot.clear()
        self._prefilling = [slot for slot in self._prefilling if slot.ticket is not None]

    def free(self, tickets: Sequence[Ticket]) -> None:
        """Free the slots of requests that have ended."""
        ended = set(tickets)
        for slot in self.slots:
            if slot.ticket in ended:
                self._prefixes.free(slot)
                kept = count_pages(slot.stored)
                self._pool.release(slot.pages[kept:])
                del slot.pages[kept:]
                slot.changed_at = next(self._clock)
                self._is_blocked = False
        self._prefilling = [slot for slot in self._prefilling if slot.ticket is not None]

    def _slots_by_age(self, *, occupied: bool) -> list[Slot]:
        """Return the slots with or without a request, least recently changed first."""
        slots = [slot for slot in self.slots if (slot.ticket is not None) == occupied]
        return sorted(slots, key=lambda slot: slot.changed_at)

    def _set_pages(self, slot: Slot, pages: list[int]) -> None:
        slot.pages = pages
        self.table[slot.index, : len(pages)] = pages

    def _num_available(self) -> int:
        """Return the number of pages that are free or store only ended sequences."""
        occupied = {page for slot in self.slots if slot.ticket for page in slot.pages}
        return self._cache.num_pages - 1 - len(occupied)

    def _allocate(self, count: int) -> list[int]:
        """Allocate pages, if necessary by evicting the sequences that ended first."""
        if count > len(self._pool):
            for slot in self._slots_by_age(occupied=False):
                self._pool.release(slot.pages)
                slot.clear()
                if count <= len(self._pool):
                    break
        return self._pool.allocate(count)

    def next_chunks(self, max_tokens: int, *, allow_split: bool) -> list[tuple[Slot, int]]:
        """Return the slots that the next pass prefills, oldest first, each with its token count.

        Without `allow_split`, only the first prompt may be processed in part.
        """
        chunks: list[tuple[Slot, int]] = []
        for slot in self._prefilling:
            count = min(slot.num_unread, max_tokens)
            if not count or (chunks and count < slot.num_unread and not allow_split):
                break
            max_tokens -= count
            chunks.append((slot, count))
        return chunks

    def record_prefilled(self, chunks: Sequence[tuple[Slot, int]]) -> None:
        """Add the numbers of tokens that a prefill pass has stored to the slots' counts."""
        for slot, count in chunks:
            slot.stored += count
        self._prefilling = [slot for slot in self._prefilling if slot.num_unread]


def max_pages(ticket: Ticket) -> int:
    """Return the number of pages that a request may need."""
    return count_pages(len(ticket.request.prompt) + ticket.request.max_new_tokens)


def common_prefix(a: Int[np.ndarray, " P"], b: Int[np.ndarray, " Q"]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    return int(differ.argmax()) if differ.any() else count


PREFILL = {"cpu": 2048, "cuda": 8192}
"""Maximum number of prompt tokens per pass; more would need more memory without being faster.
`pipeline/budget/memory.py` has the same numbers."""


class SlotModel:
    """Forward passes of a model that stores its keys and values in pages."""

    def __init__(self, model: nn.Module, cache: PagedCache, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._cache_argument = {cache_name(model): cache}
        self._is_cpu = device.type == "cpu"
        # transformers passes a 4-D mask through unchanged; the layouts need none.
        self._no_mask = torch.ones(1, 1, 1, 1, device=device)

    def __call__(
        self, inputs: Int[Tensor, "3 N"], layout: Layout, *, reads_pages: bool = True, keep: int = 0
    ) -> Float[Tensor, "K V"]:
        """Return the logits after the last `keep` tokens, or after all of them if `keep` is 0.

        Args:
            inputs: tokens, positions and cache indices.
            layout: attention of the pass.
            reads_pages: see `PagedCache.begin`.
            keep: number of last tokens whose logits are returned; 0 for all.
        """
        self._cache.begin(inputs[2], reads_pages=reads_pages)
        is_recorded = isinstance(layout, CurrentLayout) and layout.recorder is not None
        with LinearKernelMode() if self._is_cpu and not is_recorded else nullcontext():
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
    """The running sequences of a model, at most `num_slots`; see `OpenBatch` for the arguments."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_slots: int,
        capacity: int,
        num_pages: int,
        reuse: bool,
        passes: PassCounts,
    ) -> None:
        self.device = next(model.parameters()).device
        self.cache = PagedCache(num_pages)
        tp_group = get_tp_group(base_model(model))
        self._is_single_process = tp_group.size == 1
        # Passes that run ahead of the host can't allocate pages.
        lookahead = PAGE if self.device.type == "cuda" and self._is_single_process else 0
        super().__init__(
            self.cache, num_slots=num_slots, capacity=capacity, reuse=reuse, lookahead=lookahead
        )
        self._passes = passes
        self._forward = SlotModel(model, self.cache, self.device)
        self._decode = Decoder(
            self._forward,
            model=model,
            device=self.device,
            counts=passes,
            agree=lambda ok: ok if tp_group.size == 1 else not any(tp_group.sums([not ok])),
        )

    def prefill(self, waiting: Waiting, *, chunk: int, is_closed: bool) -> None:
        """Give free slots to the oldest requests, and prefill at most `chunk` prompt tokens.

        In a closed batch, prefill all admitted prompts once `should_prefill` returns True.
        """
        self.grow(waiting)
        if self.running and not self.should_prefill(waiting, is_closed=is_closed):
            return
        self.admit(waiting)
        while self.is_prefilling:
            self._prefill_chunks(self.next_chunks(chunk, allow_split=self.device.type == "cpu"))
            if not is_closed:
                return
            if not self.is_prefilling:
                self.admit(waiting)  # requests that waited for the prefixes just stored

    @torch.inference_mode()
    def _prefill_chunks(self, chunks: Sequence[tuple[Slot, int]]) -> None:
        """Store the next tokens of each prompt."""
        layout_chunks: list[Chunk] = []
        columns: list[Int[np.ndarray, "3 N"]] = []
        for slot, count in chunks:
            layout_chunks.append(Chunk(self.table[slot.index], slot.stored, count))
            positions = np.arange(slot.stored, slot.stored + count)
            pages = self.table[slot.index, positions // PAGE].astype(np.int64)
            indices = pages * PAGE + positions % PAGE
            columns.append(np.stack([slot.tokens[positions], positions, indices]))
        # A pass of whole prompts contains all keys that its tokens attend to.
        is_unchunked = not any(chunk.first for chunk in layout_chunks)
        layout = (
            Ragged([count for _, count in chunks], self.device, kernels=kernel_mode())
            if is_unchunked
            else ChunkedAttention(layout_chunks, self.device)
        )
        inputs = torch.from_numpy(np.concatenate(columns, axis=1)).to(self.device)
        self._forward(inputs, layout, reads_pages=not is_unchunked, keep=1)
        self._passes.prefill += 1
        self.record_prefilled(chunks)

    @torch.inference_mode()
    def step(self) -> tuple[list[Ticket], Float[Tensor, "B V"]]:
        """Process each running sequence's newest token; return the logits of the next tokens."""
        slots, running = self.running_slots, self.running
        lengths = [slot.length + 1 for slot in slots]
        pages = self.table[[slot.index for slot in slots], : max(len(slot.pages) for slot in slots)]
        last = np.array(lengths) - 1
        indices = pages[np.arange(len(slots)), last // PAGE] * PAGE + last % PAGE
        tokens = [ticket.newest_token for ticket in running]
        columns = list(zip(tokens, last.tolist(), indices.tolist(), strict=True))
        layout = DecodeAttention(lengths, pages, self.device)
        # The pass that allocates the cache can't be replayed.
        return running, self._decode(columns, layout, allow_replay=bool(self.cache.keys))

    def decode_ahead(
        self, tickets: Sequence[Ticket], logits: Float[Tensor, "B V"]
    ) -> AheadDecoder | None:
        """Start decoding the last pass's sequences ahead of the host; return None if impossible."""
        rows = self._decode.replayed
        if rows is None or not self._is_single_process or not can_decode_ahead(tickets):
            return None
        limits = [
            PAGE * len(slot.pages) - slot.length - 1
            for slot, ticket in zip(self.running_slots, tickets, strict=True)
            if PAGE * len(slot.pages) - slot.length - 1 < remaining_tokens(ticket)
        ]
        limit = min(limits, default=None)
        return AheadDecoder(rows, tickets, logits, max_passes=limit, counts=self._passes)
