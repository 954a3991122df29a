"""Generation for models whose attention is their own: left-padded batches, one after the other.

Used where `inference/engine/slots.py` can't be: layers with convolutions or a recurrent state,
ALiBi, soft-capping. Exact masks and positions; rows that have ended leave the batch once they fill
half of it. Dimension names: B rows, P tokens so far, T tokens of one forward pass, V vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from inference.engine.requests import Ticket, Waiting
from pipeline.models.forward import base_model, cache_name

SORTED = 8
"""Batches whose requests are sorted by length together; more pad less, and keep more waiting."""


class PaddedRows:
    """The running sequences of a model, `batch_size` at a time; the next wait for all to end."""

    def __init__(self, model: nn.Module, *, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size
        self._batch: PaddedBatch | None = None
        self._among = 0
        """How many of the waiting are sorted together."""
        self._next: list[Ticket] = []
        """Those whose prompts are to be read."""
        self.tokens_read = 0
        """Of prompts beside those who go on: none."""

    @property
    def running(self) -> Sequence[Ticket]:
        """The sequences of the batch that have not ended."""
        tickets = [] if self._batch is None else self._batch.tickets
        return [ticket for ticket in tickets if not ticket.ended]

    @property
    def occupants(self) -> Sequence[Ticket]:
        """The running sequences, and those that come next."""
        return [*self.running, *self._next]

    @property
    def reads(self) -> bool:
        """Whether the prompts of a batch are still to be read."""
        return bool(self._next)

    @property
    def has_ready(self) -> bool:
        """Never true: no prompt's keys and values are kept, so each one is read."""
        return False

    @property
    def num_reading(self) -> int:
        """Prompts of which tokens are still to be read."""
        return len(self._next)

    def fits_step(self, chunk: int) -> bool:  # noqa: ARG002
        """Never true: prompts wait for the batch to end."""
        return False

    def free(self, tickets: Sequence[Ticket]) -> None:
        """Nothing: their rows leave the batch, or it ends."""

    def admit(self, waiting: Waiting) -> None:
        """Begin a batch with the shortest of the oldest prompts, if none runs."""
        if self.running:
            return
        self._among = min(self._among or SORTED * self._batch_size, len(waiting))
        among = waiting.oldest(self._among)
        tickets = sorted(among, key=lambda ticket: len(ticket.request.prompt))[: self._batch_size]
        self._among -= len(tickets)
        for ticket in tickets:
            waiting.remove(ticket)
        self._next = tickets

    def read(
        self,
        waiting: Waiting,  # noqa: ARG002
        *,
        chunk: int,  # noqa: ARG002  # a batch reads its prompts at once
        to_the_end: bool,  # noqa: ARG002
    ) -> tuple[Sequence[Ticket], Float[Tensor, "B V"]]:
        """Read the prompts: the batch, and the logits of the first tokens."""
        self._batch = PaddedBatch(self._model, self._next)
        tickets, self._next = self._next, []
        return tickets, self._batch.forward()

    def step(
        self,
        waiting: Waiting,  # noqa: ARG002
        *,
        chunk: int = 0,  # noqa: ARG002
    ) -> tuple[Sequence[Ticket], Float[Tensor, "B V"]]:
        """Read the newest tokens; the logits of the next ones.

        Sequences that ended and are still in the batch are among them: their tokens go nowhere.
        """
        assert self._batch is not None
        self._batch.append()
        return self._batch.tickets, self._batch.forward()


class PaddedBatch:
    """A batch in the middle of generation: its rows, its cache, its masks."""

    def __init__(self, model: nn.Module, tickets: Sequence[Ticket]) -> None:
        self.model = model
        self.tickets = list(tickets)
        """Which response each row of the tensors belongs to."""
        self.cache = DynamicCache(config=base_model(model).config)
        self._kept = {cache_name(model): self.cache}
        device = next(model.parameters()).device
        prompts = [ticket.request.prompt for ticket in tickets]
        width = max(len(prompt) for prompt in prompts)
        gaps = [width - len(prompt) for prompt in prompts]
        self.mask: Int[Tensor, "B P"] = torch.tensor(
            [[0] * gap + [1] * (width - gap) for gap in gaps], device=device
        )
        self.inputs: Int[Tensor, "B T"] = torch.tensor(
            [[prompt[0]] * gap + list(prompt) for gap, prompt in zip(gaps, prompts, strict=True)],
            device=device,
        )

    @torch.no_grad()
    def forward(self) -> Float[Tensor, "B V"]:
        """Logits of the next token of each row."""
        positions = (self.mask.cumsum(dim=-1) - 1).clamp(min=0)
        output = self.model(
            input_ids=self.inputs,
            attention_mask=self.mask,
            position_ids=positions[:, -self.inputs.shape[1] :],
            use_cache=True,
            logits_to_keep=1,
            **self._kept,
        )
        return output.logits[:, -1]

    def append(self) -> None:
        """Feed the newest tokens next; drop ended rows once they fill half the batch."""
        tokens = [ticket.newest for ticket in self.tickets]
        running = [not ticket.ended for ticket in self.tickets]
        self.inputs = torch.tensor(tokens, device=self.mask.device)[:, None]
        # The tokens of ended rows stay out of sight, so that their positions never grow past the
        # model's context while other rows go on.
        self.mask = torch.cat([self.mask, self.mask.new_tensor(running)[:, None]], dim=-1)
        if sum(running) * 2 > len(running):
            return
        kept = [row for row, runs in enumerate(running) if runs]
        index = torch.tensor(kept, device=self.mask.device)
        self.tickets = [self.tickets[row] for row in kept]
        self.inputs, self.mask = self.inputs[index], self.mask[index]
        self.cache.batch_select_indices(index)
