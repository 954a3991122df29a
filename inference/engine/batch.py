"""Continuous generation: requests run together and can be submitted or cancelled at any time.

    batch = OpenBatch(model, num_slots=8, capacity=512)
    ticket = batch.submit(Request(prompt, sampler, key=0, max_new_tokens=64))
    for event in batch.step():
        ...  # TokenEvent(ticket, id, logprob) or EndEvent(ticket, reason, error)

Dimension names: B sequences, V vocabulary.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from operator import index
from traceback import format_exception
from typing import cast
from weakref import WeakValueDictionary

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.engine.ahead import AheadDecoder
from inference.engine.cache import count_pages
from inference.engine.padded import PaddedRows
from inference.engine.replay import PassCounts
from inference.engine.requests import (
    Choice,
    EndEvent,
    Event,
    Reason,
    Request,
    Ticket,
    TokenEvent,
    TokenLogprobs,
    Waiting,
)
from inference.engine.sampling import Sampler, compute_logprobs
from inference.engine.slots import PREFILL, Slots
from inference.tensor_parallel import get_tp_group
from pipeline.models.forward.forward import base_model, context_length, is_ragged
from pipeline.system.errors import DataError, is_out_of_memory

logger = logging.getLogger(__name__)


class OpenBatch:
    """A batch that requests join and leave while others run.

    `submit` and `cancel` may be called from any thread, all other methods from only one. A step
    prefills at most `chunk` prompt tokens, so that long prompts don't hold up running sequences,
    and decodes one token of each running sequence. A closed batch admits requests in groups and
    prefills their prompts at once, in as few passes as possible.

    With a tensor-parallel model, all processes of the group must close the batch with the same
    requests, cancel the same ones, and call `step` the same number of times. `step` raises the
    errors of such a model, because the other processes wait in a collective.

    Args:
        model: a causal language model, plain or with adapters.
        num_slots: number of sequences that run at once; if memory runs out, it is halved.
        capacity: maximum number of tokens per sequence (prompt and response).
        num_pages: number of cache pages, for at least one sequence; by default, for all slots.
        chunk: maximum number of prompt tokens per step (default `PREFILL`).
        reuse_prefixes: whether a prompt reuses its longest common prefix with any sequence of the
            same `scope` in a slot, running or ended; otherwise only identical prompts share.
        passes: counts the passes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_slots: int,
        capacity: int,
        num_pages: int | None = None,
        chunk: int | None = None,
        reuse_prefixes: bool = False,
        passes: PassCounts | None = None,
    ) -> None:
        self._model = model
        self.passes = PassCounts() if passes is None else passes
        self._num_slots = num_slots
        plain = base_model(model)
        # If rotary angles depend on a pass's length, prompts can't be processed in chunks.
        is_chunkable = has_fixed_positions(plain)
        default_chunk = PREFILL[next(model.parameters()).device.type]
        self._chunk = chunk or default_chunk if is_chunkable else default_chunk
        self._reuse_prefixes = reuse_prefixes and is_chunkable
        self.capacity = min(capacity, context_length(plain))
        self._num_pages = num_pages or 1 + num_slots * count_pages(self.capacity)
        self._vocabulary = len(cast("nn.Embedding", plain.get_input_embeddings()).weight)
        self._submitted: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._waiting: Waiting = {}
        self._closed = False
        self._samplers: WeakValueDictionary[tuple[object, ...], Sampler] = WeakValueDictionary()
        self._is_tensor_parallel = get_tp_group(plain).size > 1
        self._rows = self._new_rows()
        self._ahead: AheadDecoder | None = None

    def _new_rows(self) -> Slots | PaddedRows:
        if supports_slots(base_model(self._model)):
            return Slots(
                self._model,
                num_slots=self._num_slots,
                capacity=self.capacity,
                num_pages=self._num_pages,
                reuse=self._reuse_prefixes,
                passes=self.passes,
            )
        _log_padded(str(base_model(self._model).config.model_type))
        return PaddedRows(self._model, batch_size=self._num_slots)

    def submit(self, request: Request) -> Ticket:
        """Queue a request; the following steps return its events.

        Raises:
            DataError: the request can't be served; the message gives the reason.
        """
        prompt = tuple(map(index, request.prompt))
        num_tokens = len(prompt)
        if num_tokens == 0:
            raise DataError("a prompt has no tokens; it needs at least one")
        invalid = [token for token in prompt if not 0 <= token < self._vocabulary]
        if invalid:
            raise DataError(
                f"a prompt has the token id {invalid[0]}, but the model's ids are 0 to"
                f" {self._vocabulary - 1}; use the model's tokenizer"
            )
        if request.max_new_tokens < 1:
            raise DataError(f"max_new_tokens must be positive, got {request.max_new_tokens}")
        if num_tokens + request.max_new_tokens > self.capacity:
            raise DataError(
                f"a prompt of {num_tokens} tokens and a response of {request.max_new_tokens} don't"
                f" fit in a slot of {self.capacity} tokens; shorten the prompt or lower"
                " max_new_tokens"
            )
        if self._closed:
            raise RuntimeError("the batch is closed")
        ticket = Ticket(replace(request, prompt=prompt))
        self._submitted.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a response before its next token; do nothing if it has ended."""
        self._cancelled.append(ticket)

    def close(self) -> None:
        """Declare that all requests have been submitted."""
        self._closed = True

    @property
    def busy(self) -> bool:
        """Whether any response has not ended."""
        return bool(self._submitted or self._waiting or self._rows.occupants)

    def step(self) -> list[Event]:
        """Prefill prompts, decode one token of each running sequence, and return the events."""
        return [*self._process_queues(), *self._advance()]

    def _process_queues(self) -> Iterator[Event]:
        """Queue the submitted requests, and end the cancelled ones."""
        # Drain cancellations first: another thread may submit and cancel in between.
        cancelled, submitted = drain(self._cancelled), drain(self._submitted)
        for ticket in submitted:
            # Rows with equal settings share a sampler, which is then called once for all.
            settings = tuple(vars(ticket.sampler).values())
            ticket.sampler = self._samplers.setdefault(settings, ticket.sampler)
            self._waiting[ticket] = None
        for ticket in cancelled:
            if ticket.ended:
                continue
            if ticket in self._waiting:
                del self._waiting[ticket]
            else:
                self._rows.free([ticket])
            yield self._finish(ticket, "cancelled")

    def _advance(self) -> Iterator[Event]:
        try:
            tickets, choices, top_logprobs = self._forward()
        except Exception as error:
            if self._is_tensor_parallel:
                raise
            interrupted, will_retry = self._rows.occupants, self._halve_slots(error)
            self._rows, self._ahead = self._new_rows(), None  # the cache may be inconsistent
            discard_traceback(error)
            for ticket in interrupted:
                if will_retry:
                    ticket.reset_prefill()
                else:
                    yield self._finish(ticket, "error", error)
            if will_retry:
                self._waiting = dict.fromkeys(interrupted) | self._waiting
            return
        for row, (ticket, choice) in enumerate(zip(tickets, choices, strict=True)):
            yield from self._record(ticket, choice, top_logprobs.get(row))
        self._rows.free([ticket for ticket in tickets if ticket.ended])

    def _halve_slots(self, error: Exception) -> bool:
        """Halve the slots after an out-of-memory error; return False if that is not possible."""
        if not is_out_of_memory(error) or self._num_slots == 1:
            return False
        self._num_slots //= 2
        self._num_pages = 1 + max((self._num_pages - 1) // 2, count_pages(self.capacity))
        logger.warning("out of memory: lowering the number of sequences to %d", self._num_slots)
        return True

    def _forward(self) -> tuple[Sequence[Ticket], list[Choice], dict[int, TokenLogprobs]]:
        """Prefill and decode; return requests, their choices, and `TokenLogprobs` by row."""
        rows = self._rows
        if self._ahead is None:
            rows.prefill(self._waiting, chunk=self._chunk, is_closed=self._closed)
            if not rows.running:
                return (), [], {}
            tickets, logits = rows.step()
            self._ahead = rows.decode_ahead(tickets, logits) if isinstance(rows, Slots) else None
            if self._ahead is None:
                choices = choose_tokens(tickets, logits)
                return tickets, choices, requested_logprobs(tickets, logits, choices)
        ahead = self._ahead
        assert isinstance(rows, Slots)
        if ahead.can_launch and not rows.should_prefill(self._waiting, is_closed=self._closed):
            ahead.launch()
        choices = ahead.read()
        if ahead.is_drained:
            self._ahead = None
        return ahead.tickets, choices, {}

    def _record(
        self, ticket: Ticket, choice: Choice, top_logprobs: TokenLogprobs | None
    ) -> Iterator[Event]:
        """Append the chosen token to the response, and yield the events."""
        if ticket.ended:
            return  # a padded batch keeps the rows of finished requests
        if isinstance(choice, Exception):
            if self._is_tensor_parallel:
                raise choice
            yield self._finish(ticket, "error", choice)
            return
        ticket.newest_token, logprob = choice
        response = ticket.response
        response.ids.append(ticket.newest_token)
        response.logprobs.append(logprob)
        response.top_logprobs += [] if top_logprobs is None else [top_logprobs]
        response.stopped = ticket.newest_token in ticket.sampler.stop_ids
        yield TokenEvent(ticket, ticket.newest_token, logprob, top_logprobs)
        if response.stopped:
            yield self._finish(ticket, "stop")
        elif len(response.ids) == ticket.request.max_new_tokens:
            yield self._finish(ticket, "length")

    def _finish(self, ticket: Ticket, reason: Reason, error: Exception | None = None) -> EndEvent:
        ticket.ended = True
        return EndEvent(ticket, reason, error)


def choose_tokens(tickets: Sequence[Ticket], logits: Float[Tensor, "B V"]) -> list[Choice]:
    """Choose a token for each sequence; sequences with the same sampler share one call."""
    groups: dict[int, list[int]] = {}
    for row, ticket in enumerate(tickets):
        groups.setdefault(id(ticket.sampler), []).append(row)
    if len(groups) == 1:
        return _choose_in_group(tickets, logits)
    choices: dict[int, Choice] = {}
    for rows in groups.values():
        chosen = _choose_in_group([tickets[row] for row in rows], logits[rows])
        choices.update(zip(rows, chosen, strict=True))
    return [choices[row] for row in range(len(tickets))]


def _choose_in_group(tickets: Sequence[Ticket], logits: Float[Tensor, "B V"]) -> list[Choice]:
    sampler = tickets[0].sampler
    try:
        tokens, logprobs = sampler(
            logits,
            [ticket.key for ticket in tickets],
            [ticket.request.num_drawn + len(ticket.response.ids) for ticket in tickets],
            [ticket.tokens for ticket in tickets] if sampler.needs_history else (),
            [ticket.response.ids for ticket in tickets] if sampler.counts_tokens else (),
        )
    except Exception as error:  # noqa: BLE001  # it may affect only one row
        if len(tickets) == 1:
            discard_traceback(error)
            return [error]
    else:
        return list(zip(tokens, logprobs, strict=True))
    rows = zip(tickets, logits.split(1), strict=True)
    return [_choose_in_group([ticket], row)[0] for ticket, row in rows]


def requested_logprobs(
    tickets: Sequence[Ticket], logits: Float[Tensor, "B V"], choices: Sequence[Choice]
) -> dict[int, TokenLogprobs]:
    """Return the `TokenLogprobs` of the requests that set `num_top`, by row."""
    chosen = {
        row: (choice[0], ticket.request.num_top)
        for row, (ticket, choice) in enumerate(zip(tickets, choices, strict=True))
        if ticket.request.num_top is not None and not isinstance(choice, Exception)
    }
    if not chosen:
        return {}
    tokens = [token for token, _ in chosen.values()]
    counts = [count or 0 for _, count in chosen.values()]
    return dict(zip(chosen, compute_logprobs(logits[[*chosen]], tokens, counts), strict=True))


def discard_traceback(error: Exception) -> None:
    """Replace an error's traceback with a note, since its frames would keep the cache alive."""
    error.add_note("".join(format_exception(error)).rstrip())
    error.__traceback__ = error.__cause__ = error.__context__ = None


def supports_slots(model: PreTrainedModel) -> bool:
    """Return whether the model uses ragged attention and every layer has its own keys."""
    num_shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", None)
    return is_ragged(model) and not num_shared


def has_fixed_positions(model: PreTrainedModel) -> bool:
    """Return whether the encoding of a position is independent of the length of the pass."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return not any(rope.get("rope_type") in ("dynamic", "longrope") for rope in ropes)


def drain(tickets: deque[Ticket]) -> list[Ticket]:
    """Remove and return the tickets of a queue to which other threads may append."""
    return [tickets.popleft() for _ in range(len(tickets))]


@cache
def _log_padded(model_type: str) -> None:
    logger.info("%s does not support the slot cache: generating in padded batches", model_type)
