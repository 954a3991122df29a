"""Generation without a slot cache: left-padded batches, one after another.

For models that `inference/engine/slots.py` doesn't support, such as those with convolutions, a
recurrent state, ALiBi or soft-capping. Dimension names: B rows, P tokens so far, T tokens of one
forward pass, V vocabulary.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from inference.engine.requests import Ticket, Waiting
from pipeline.models.forward.forward import base_model, cache_name


class PaddedRows:
    """The running sequences of a model, at most `batch_size`; others wait until all have ended."""

    def __init__(self, model: nn.Module, *, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size
        self._batch: PaddedBatch | None = None

    @property
    def running(self) -> list[Ticket]:
        """The requests of the batch that have not ended."""
        tickets = [] if self._batch is None else self._batch.tickets
        return [ticket for ticket in tickets if not ticket.ended]

    occupants = running

    def free(self, tickets: Sequence[Ticket]) -> None:
        """Do nothing: rows of finished requests leave the batch in `step`."""

    def prefill(self, waiting: Waiting, *, chunk: int, is_closed: bool) -> None:
        """If no batch is running, start one with the oldest prompts (shortest if `is_closed`)."""
        del chunk  # prompts are not chunked
        if self.running or not waiting:
            return
        # Prompts of similar lengths need less padding.
        queue = sorted(waiting, key=lambda ticket: len(ticket.prompt)) if is_closed else waiting
        tickets = list(islice(queue, self._batch_size))
        for ticket in tickets:
            del waiting[ticket]
        self._batch = PaddedBatch(self._model, tickets)

    def step(self) -> tuple[list[Ticket], Float[Tensor, "B V"]]:
        """Process the prompts or the newest tokens; return the logits of the next tokens.

        Finished requests keep their rows until they are half of the batch; their tokens are unused.
        """
        assert self._batch is not None
        logits = self._batch.forward()
        return self._batch.tickets, logits


class PaddedBatch:
    """The rows, cache and masks of a batch."""

    def __init__(self, model: nn.Module, tickets: Sequence[Ticket]) -> None:
        self.model = model
        self.tickets = list(tickets)
        """The request of each row."""
        self.cache = DynamicCache(config=base_model(model).config)
        self._cache_argument = {cache_name(model): self.cache}
        self._has_read = False
        device = next(model.parameters()).device
        prompts = [ticket.tokens for ticket in tickets]
        width = max(map(len, prompts))
        gaps = [width - len(prompt) for prompt in prompts]
        self.mask: Int[Tensor, "B P"] = torch.tensor(
            [[0] * gap + [1] * (width - gap) for gap in gaps], device=device
        )
        self.inputs: Int[Tensor, "B T"] = torch.tensor(
            [[prompt[0]] * gap + prompt for gap, prompt in zip(gaps, prompts, strict=True)],
            device=device,
        )

    @torch.no_grad()
    def forward(self) -> Float[Tensor, "B V"]:
        """Return the logits of each row's next token."""
        if self._has_read:
            self._append()
        self._has_read = True
        positions = (self.mask.cumsum(dim=-1) - 1).clamp(min=0)
        output = self.model(
            input_ids=self.inputs,
            attention_mask=self.mask,
            position_ids=positions[:, -self.inputs.shape[1] :],
            use_cache=True,
            logits_to_keep=1,
            **self._cache_argument,
        )
        return output.logits[:, -1]

    def _append(self) -> None:
        """Append the newest tokens; drop ended rows once they make up half of the batch."""
        tokens = [ticket.newest_token for ticket in self.tickets]
        running = [not ticket.ended for ticket in self.tickets]
        self.inputs = torch.tensor(tokens, device=self.mask.device)[:, None]
        # Tokens of ended rows are masked, so that their positions stay within the context.
        self.mask = torch.cat([self.mask, self.mask.new_tensor(running)[:, None]], dim=-1)
        if sum(running) * 2 > len(running):
            return
        kept = [row for row, runs in enumerate(running) if runs]
        index = torch.tensor(kept, device=self.mask.device)
        self.tickets = [self.tickets[row] for row in kept]
        self.inputs, self.mask = self.inputs[index], self.mask[index]
        self.cache.batch_select_indices(index)
