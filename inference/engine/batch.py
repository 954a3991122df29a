"""Generation as requests come: each is submitted, runs beside the others, and may be cancelled.

    batch = OpenBatch(model, num_slots=8, capacity=512)
    ticket = batch.submit(Request(prompt, sampler, key=0, max_new_tokens=64))
    for event in batch.step():
        ...  # Token(ticket, id, logprob), Ended(ticket, reason, error)

Prompts are read apart from decoding, which takes one token of all running sequences at once.
Dimension names: B sequences, V vocabulary.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from operator import index
from time import perf_counter
from traceback import format_exception
from typing import cast
from weakref import WeakValueDictionary

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.engine.pace import Pace
from inference.engine.padded import PaddedRows
from inference.engine.replay import PassCounts
from inference.engine.reported import reported
from inference.engine.requests import (
    Choice,
    Ended,
    Event,
    Reason,
    Reported,
    Request,
    Ticket,
    Token,
    Waiting,
)
from inference.engine.row_adapters import RowAdapters
from inference.engine.sampling import Sampler
from inference.engine.slots import PREFILL, Slots
from inference.tp_group import tp_group_of
from pipeline.errors import DataError
from pipeline.models.forward import base_model, context_length, is_ragged

logger = logging.getLogger(__name__)

Rows = Slots | PaddedRows
"""The running sequences of a model."""


class OpenBatch:
    """A batch that requests join and leave while others run.

    `submit` and `cancel` may be called from any thread, all else from one. With each decoding step
    a chunk of prompts is read, so that a long prompt doesn't hold up the others; once the batch is
    closed, all prompts that have a slot are read first, which takes the fewest passes.

    With a tensor-parallel model, all processes of the group must close the batch with the same
    requests, cancel the same ones, and call `step` equally often. `step` raises the errors of such
    a model, because the other processes wait in a collective.

    Args:
        model: a causal language model, plain or with adapters.
        num_slots: sequences that run at once.
        capacity: most tokens of a sequence, prompt and response.
        chunk: most tokens of prompts between two decoding steps.
        gap: how many times as long as alone a step may take beside one prompt, as `Pace` has it;
            None is any.
        clock: in seconds, for `gap`.
        reuses: whether a prompt takes over the keys and values of the sequences in slots, ended
            ones too, as far as it begins like one of them in the same `scope`.
        adapters: those that the model's layers have; each request names its own.
        passes: where decoding passes are counted; of its own if not given.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_slots: int,
        capacity: int,
        chunk: int = PREFILL,
        gap: float | None = None,
        clock: Callable[[], float] = perf_counter,
        reuses: bool = False,
        adapters: RowAdapters | None = None,
        passes: PassCounts | None = None,
    ) -> None:
        self._model = model
        self.passes = PassCounts() if passes is None else passes
        self._num_slots = num_slots
        self._adapters = adapters
        plain = base_model(model)
        # Where angles depend on the length of a pass, pieces differ from the whole.
        fixed = has_fixed_positions(plain)
        self._chunk, self._reuses = (chunk, reuses) if fixed else (PREFILL, False)
        self.capacity = min(capacity, context_length(plain))
        self._vocabulary = len(cast("nn.Embedding", plain.get_input_embeddings()).weight)
        self._submitted: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._waiting = Waiting()
        self._has_read = False
        self._decoded = 0
        """Rows of the pass at hand that decode."""
        self._closed = False
        self._samplers: WeakValueDictionary[tuple[object, ...], Sampler] = WeakValueDictionary()
        self._is_tensor_parallel = tp_group_of(plain).size > 1
        self._pace = Pace(gap, self._chunk, clock)
        self._rows = self._new_rows()

    def _new_rows(self) -> Rows:
        if takes_slots(base_model(self._model)):
            return Slots(
                self._model,
                num_slots=self._num_slots,
                capacity=self.capacity,
                reuses=self._reuses,
                passes=self.passes,
                adapters=self._adapters,
            )
        _log_padded(str(base_model(self._model).config.model_type))
        return PaddedRows(self._model, batch_size=self._num_slots)

    def submit(self, request: Request) -> Ticket:
        """Queue a request; its events come from the steps that follow.

        Raises:
            DataError: it can never be answered; one sentence says why.
        """
        prompt = tuple(map(index, request.prompt))
        num_tokens = len(prompt)
        if num_tokens == 0:
            raise DataError("a prompt has no tokens; give it at least one")
        outside = [token for token in prompt if not 0 <= token < self._vocabulary]
        if outside:
            raise DataError(
                f"a prompt has the token id {outside[0]}, and the model's are 0 to"
                f" {self._vocabulary - 1}; use its own tokenizer"
            )
        if request.max_new_tokens < 1:
            raise DataError(f"max_new_tokens must be above 0: {request.max_new_tokens}")
        if num_tokens + request.max_new_tokens > self.capacity:
            raise DataError(
                f"a prompt of {num_tokens} tokens and a response of {request.max_new_tokens} don't"
                f" fit the {self.capacity} tokens of a slot; shorten the prompt or lower"
                " max_new_tokens"
            )
        num_adapters = 0 if self._adapters is None else self._adapters.count
        if not 0 <= request.adapter <= num_adapters:
            raise DataError(f"there is no adapter {request.adapter}; there are {num_adapters}")
        if self._closed:
            raise RuntimeError("the batch is closed")
        ticket = Ticket(replace(request, prompt=prompt))
        self._submitted.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a response before its next token; one that has ended stays as it is."""
        self._cancelled.append(ticket)

    def close(self) -> None:
        """Nothing more is submitted: only the end of all is waited for."""
        self._closed = True

    @property
    def busy(self) -> bool:
        """Whether a response is still to end."""
        return bool(self._submitted or self._waiting or self._rows.occupants)

    def step(self) -> list[Event]:
        """What happens in the next pass over prompts or the next decoding step."""
        return [*self._take_changes(), *self._advance()]

    def _advance(self) -> Iterator[Event]:
        """One pass, and the tokens that are chosen after it."""
        self._pace.begin()
        try:
            tickets, logits = self._forward()
        except Exception as error:
            if self._is_tensor_parallel:
                raise
            lost = self._rows.occupants
            self._rows = self._new_rows()  # what the cache holds is not known any more
            let_go(error)
            for ticket in lost:
                yield self._end(ticket, "error", error)
            return
        if logits is None:
            if not self._rows.num_reading:
                self._pace.forget()
            return
        choices = choose_tokens(tickets, logits)
        self._pace.end(self._decoded, self._rows.tokens_read)
        wanted = reports(tickets, logits, choices)
        for row, (ticket, choice) in enumerate(zip(tickets, choices, strict=True)):
            yield from self._record(ticket, choice, wanted.get(row))
        self._rows.free([ticket for ticket in tickets if ticket.ended])

    def _take_changes(self) -> Iterator[Event]:
        """Queue what was submitted, and end what was cancelled."""
        # In this order, for what another thread submits and cancels meanwhile.
        cancelled, submitted = taken(self._cancelled), taken(self._submitted)
        for ticket in submitted:
            # Rows of equal settings are those with the same sampler.
            settings = tuple(vars(ticket.sampler).values())
            ticket.sampler = self._samplers.setdefault(settings, ticket.sampler)
            self._waiting.add(ticket)
        for ticket in cancelled:
            if ticket.ended:
                continue
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            else:
                self._rows.free([ticket])
            yield self._end(ticket, "cancelled")

    def _forward(self) -> tuple[Sequence[Ticket], Float[Tensor, "B V"] | None]:
        """One pass over prompts, or over one token of each running sequence: sequences and logits.

        Few tokens of prompts go with a decoding step; more have a pass of their own before it. The
        logits are None where nothing runs or a prompt is still to be read to its end.
        """
        rows = self._rows
        rows.admit(self._waiting)
        self._decoded = len(rows.running)
        if rows.reads and (self._closed or not self._decoded):
            return self._read(self._chunk)
        if rows.has_ready:
            return self._read(0)
        prompts = rows.num_reading
        chunk = self._pace.chunk(self._decoded, prompts) if prompts else 0
        if chunk and not rows.fits_step(chunk):
            if not self._has_read:
                self._has_read = True
                return self._read(chunk)
            chunk = 0
        self._has_read = False
        return rows.step(self._waiting, chunk=chunk) if self._decoded else ((), None)

    def _read(self, chunk: int) -> tuple[Sequence[Ticket], Float[Tensor, "B V"] | None]:
        self._decoded = 0
        return self._rows.read(self._waiting, chunk=chunk, to_the_end=self._closed)

    def _record(self, ticket: Ticket, choice: Choice, report: Reported | None) -> Iterator[Event]:
        """Append a chosen token to its response."""
        if isinstance(choice, Exception):
            if ticket.ended:
                return
            if self._is_tensor_parallel:
                raise choice
            yield self._end(ticket, "error", choice)
            return
        ticket.newest, logprob = choice
        if ticket.ended:
            return  # its row is still in the batch, and its token goes nowhere
        response = ticket.response
        response.ids.append(ticket.newest)
        response.logprobs.append(logprob)
        response.stopped = ticket.newest in ticket.sampler.stop_ids
        yield Token(ticket, ticket.newest, logprob, report)
        if response.stopped:
            yield self._end(ticket, "stop")
        elif len(response.ids) == ticket.request.max_new_tokens:
            yield self._end(ticket, "length")

    def _end(self, ticket: Ticket, reason: Reason, error: Exception | None = None) -> Ended:
        ticket.ended = True
        return Ended(ticket, reason, error)


def choose_tokens(tickets: Sequence[Ticket], logits: Float[Tensor, "B V"]) -> list[Choice]:
    """A token for each sequence, by its own settings; those of equal settings in one call."""
    groups: dict[int, list[int]] = {}
    for row, ticket in enumerate(tickets):
        groups.setdefault(id(ticket.sampler), []).append(row)
    if len(groups) == 1:
        return _choose_alike(tickets, logits)
    choices: dict[int, Choice] = {}
    for rows in groups.values():
        alike = _choose_alike([tickets[row] for row in rows], logits[rows])
        choices.update(zip(rows, alike, strict=True))
    return [choices[row] for row in range(len(tickets))]


def _choose_alike(tickets: Sequence[Ticket], logits: Float[Tensor, "B V"]) -> list[Choice]:
    sampler = tickets[0].sampler
    try:
        tokens, logprobs = sampler(
            logits,
            [ticket.key for ticket in tickets],
            [ticket.request.drawn + len(ticket.response.ids) for ticket in tickets],
            [ticket.tokens for ticket in tickets] if sampler.needs_history else (),
            [ticket.response.ids for ticket in tickets] if sampler.counts_tokens else (),
        )
    except Exception as error:  # noqa: BLE001  # whatever it is, it may be one row's alone
        if len(tickets) == 1:
            let_go(error)
            return [error]
    else:
        return list(zip(tokens, logprobs, strict=True))
    rows = zip(tickets, logits.split(1), strict=True)
    return [_choose_alike([ticket], row)[0] for ticket, row in rows]


def reports(
    tickets: Sequence[Ticket], logits: Float[Tensor, "B V"], choices: Sequence[Choice]
) -> dict[int, Reported]:
    """What the policy says of the token in each row whose request wants it."""
    chosen = {
        row: (choice[0], ticket.request.num_top)
        for row, (ticket, choice) in enumerate(zip(tickets, choices, strict=True))
        if ticket.request.num_top is not None and not isinstance(choice, Exception)
    }
    if not chosen:
        return {}
    tokens = [token for token, _ in chosen.values()]
    counts = [count or 0 for _, count in chosen.values()]
    return dict(zip(chosen, reported(logits[[*chosen]], tokens, counts), strict=True))


def let_go(error: Exception) -> None:
    """Have an error say in words where it arose: frames would keep a cache for whoever keeps it."""
    error.add_note("".join(format_exception(error)).rstrip())
    error.__traceback__ = error.__cause__ = error.__context__ = None


def takes_slots(model: PreTrainedModel) -> bool:
    """Whether the model was loaded with ragged attention and each layer keeps keys of its own."""
    shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", None)
    return is_ragged(model) and not shared


def has_fixed_positions(model: PreTrainedModel) -> bool:
    """Whether a token's position is the same to the model however long the pass is."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return not any(each.get("rope_type") in ("dynamic", "longrope") for each in kinds)


def taken(tickets: deque[Ticket]) -> list[Ticket]:
    """What a queue holds now, taken out of it; others may go on filling it."""
    return [tickets.popleft() for _ in range(len(tickets))]


@cache
def _log_padded(kind: str) -> None:
    """Say once for each kind of model that it generates the slow way."""
    logger.info("%s has attention of its own: it generates in padded batches, without slots", kind)
