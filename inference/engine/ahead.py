"""Decode one pass ahead of the host: the GPU feeds sampled tokens directly to the next pass.

The host reads the tokens of a pass while the GPU computes the next one. Rows are not reassigned
meanwhile: sequences that have ended are still computed, and their tokens are dropped.

Dimension names: B sequences, V vocabulary.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.engine.decoder import GraphedRows
from inference.engine.replay import PassCounts
from inference.engine.requests import Choice, Ticket


class AheadDecoder:
    """Runs passes over the same sequences, feeding sampled tokens to the next pass on the device.

    Args:
        rows: replays the passes, and has just replayed one.
        tickets: the sequences in the first rows; `can_decode_ahead(tickets)` must be true.
        logits: the result of the replayed pass.
        max_passes: number of passes for which pages are allocated; None for no limit.
        counts: counts the passes.
    """

    @torch.inference_mode()
    def __init__(
        self,
        rows: GraphedRows,
        tickets: Sequence[Ticket],
        logits: Float[Tensor, "B V"],
        *,
        max_passes: int | None,
        counts: PassCounts,
    ) -> None:
        self.tickets = tickets
        self._rows = rows
        self._counts = counts
        self._sampler = tickets[0].sampler
        longest = max(len(t.request.prompt) + len(t.response.ids) for t in tickets)
        fitting = rows.longest - longest
        self._max_passes = fitting if max_passes is None else min(max_passes, fitting)
        """Number of passes until a sequence exceeds the graph's length or its pages."""
        state = [
            (remaining_tokens(t), t.key, t.request.num_drawn + len(t.response.ids)) for t in tickets
        ]
        values = torch.from_numpy(np.array(state, np.uint64).T.copy().view(np.int64))
        self._state: Int[Tensor, "3 B"] = values.to(logits.device)
        """For each sequence: number of tokens until its limit, key, and index of the next draw."""
        self._in_flight: deque[tuple[Tensor, Tensor, torch.cuda.Event | None]] = deque()
        self._draw(logits)

    @property
    def is_drained(self) -> bool:
        """Whether the tokens of all launched passes have been read."""
        return not self._in_flight

    @property
    def can_launch(self) -> bool:
        """Whether another pass fits and is useful: at least 7/8 of rows run, and one needs it."""
        most_are_running = 8 * sum(t.ended for t in self.tickets) <= len(self.tickets)
        is_needed = any(not t.ended and remaining_tokens(t) > 0 for t in self.tickets)
        return self._max_passes > 0 and most_are_running and is_needed

    @torch.inference_mode()
    def launch(self) -> None:
        """Compute and sample the next pass, without waiting for the tokens of the last one."""
        self._max_passes -= 1
        self._counts.replayed += 1
        self._draw(self._rows.repeat()[: len(self.tickets)])

    def read(self) -> list[Choice]:
        """Wait for the oldest unread pass; return its tokens and their log-probabilities."""
        tokens, logprobs, event = self._in_flight.popleft()
        if event is not None:
            event.synchronize()
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    def _draw(self, logits: Float[Tensor, "B V"]) -> None:
        """Sample, copy the tokens into the next pass, and start copying them to the host."""
        remaining, keys, positions = self._state
        tokens, logprobs = self._sampler.draw(logits, keys, positions)
        increments = remaining.clamp(max=1)  # a row at its limit repeats its last pass
        self._rows.advance(tokens, increments)
        remaining -= increments
        positions += 1
        # Asynchronous, since non_blocking copies to pinned memory.
        tokens, logprobs = (x.to("cpu", non_blocking=True) for x in (tokens, logprobs))
        event = None
        if logits.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._in_flight.append((tokens, logprobs, event))


def remaining_tokens(ticket: Ticket) -> int:
    """Return the maximum number of response tokens after the next one."""
    return ticket.request.max_new_tokens - len(ticket.response.ids) - 1


def can_decode_ahead(tickets: Sequence[Ticket]) -> bool:
    """Return whether all tickets share a sampler without logit changes, and none sets `num_top`."""
    sampler = tickets[0].sampler
    is_uniform = all(t.sampler is sampler and t.request.num_top is None for t in tickets)
    return is_uniform and sampler.logits_change_reason is None
