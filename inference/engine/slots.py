"""Continuous batching: running sequences have slots, and free slots are refilled while others run.

Prefill passes read prompts end to end, long ones in pieces. Decoding passes take one token of every
running sequence. Dimension names: B running sequences, N tokens of one forward pass, V vocabulary.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from inference.engine.cache import NextToken, Piece, Pieces, SlotCache
from inference.engine.decoder import Decoder
from inference.engine.replay import Column, PassCounts
from inference.engine.requests import Ticket, Waiting
from inference.engine.scheduler import Scheduler, Slot
from inference.tensor_parallel import tp_group_of
from pipeline.kernels.choice import kernel_mode
from pipeline.models.attention import Layout, Ragged
from pipeline.models.forward import base_model, cache_name

PREFILL = 2048
"""Prompt tokens of one pass: more make it no faster, and cost memory."""


class SlotModel:
    """Forward passes of a model that stores its keys and values in slots."""

    def __init__(self, model: nn.Module, cache: SlotCache, device: torch.device) -> None:
        self._model = model
        self._cache = cache
        self._cache_argument = {cache_name(model): cache}
        # transformers passes a 4-D mask through unchanged; the layouts need none.
        self._no_mask = torch.ones(1, 1, 1, 1, device=device)

    def __call__(
        self, inputs: Int[Tensor, "3 N"], layout: Layout, *, reads_slots: bool = True, keep: int = 0
    ) -> Float[Tensor, "K V"]:
        """Logits after the last `keep` tokens, or after all of them if `keep` is 0.

        Args:
            inputs: tokens, positions, and places in the cache.
            layout: attention of the pass.
            reads_slots: see `SlotCache.begin`.
            keep: number of tokens.
        """
        self._cache.begin(inputs[2], reads_slots=reads_slots)
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
        capacity: most tokens of a sequence, prompt and response.
        reuses: whether prompts reuse any common prefix of the sequences in the slots, rather than
            that of equal prompts only.
        passes: counts the passes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_slots: int,
        capacity: int,
        reuses: bool,
        passes: PassCounts,
    ) -> None:
        self.device = next(model.parameters()).device
        self.cache = SlotCache(num_slots=num_slots, capacity=capacity)
        super().__init__(self.cache, reuses=reuses)
        self._passes = passes
        self._modules = SlotModel(model, self.cache, self.device)
        tp_group = tp_group_of(base_model(model))
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
        if is_closed and self.running and not self.is_due(waiting):
            return
        self.admit(waiting)
        while self.is_reading:
            self._read(self.next_pieces(chunk))
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
            request, start = slot.ticket.request, slot.index * self.cache.width
            layout_pieces.append(Piece(slot.index, slot.stored, count))
            columns += [
                (request.prompt[position], position, start + position)
                for position in range(slot.stored, slot.stored + count)
            ]
        continues = any(piece.first for piece in layout_pieces)
        layout = (
            Pieces(layout_pieces)
            if continues
            else Ragged([count for _, count in pieces], self.device, kernels=kernel_mode())
        )
        inputs = torch.tensor(columns).T.contiguous().to(self.device)
        self._modules(inputs, layout, reads_slots=continues, keep=1)
        self._passes.prefill += 1
        self.record_read(pieces)

    @torch.inference_mode()
    def step(self) -> tuple[list[Ticket], Float[Tensor, "B V"]]:
        """Read the newest token of every running sequence; the logits of the next ones."""
        self.compact()
        running = self.running
        lengths = [len(ticket.prompt) + len(ticket.response.ids) for ticket in running]
        columns = [
            (ticket.newest, length - 1, slot * self.cache.width + length - 1)
            for slot, (ticket, length) in enumerate(zip(running, lengths, strict=True))
        ]
        layout = NextToken(lengths, self.device)
        return running, self._decode(columns, layout, spare=self.cache.spare)
