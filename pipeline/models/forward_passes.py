"""Forward passes over micro-batches, on one process or through the stages of a pipeline.

A step says what is computed of a micro-batch, and goes on as if the model were whole.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from pipeline.data.batches import TokenBatch
from pipeline.models.forward import Policy
from pipeline.models.stages import Stage
from pipeline.models.stand_ins import Chunk
from pipeline.parallel.channels import What
from pipeline.parallel.device import local_device, read_scalars
from pipeline.parallel.group import Group
from pipeline.parallel.places import Places
from pipeline.parallel.schedules import Instruction, turns
from pipeline.parallel.transfer import Transfers

AHEAD = 4
"""Micro-batches that a stage may be ahead of the next one, where none goes back."""


class MicroBatch(Protocol):
    """Rows that are run together."""

    @property
    def tokens(self) -> TokenBatch:
        """Their sequences."""
        ...


T = TypeVar("T")
B = TypeVar("B", bound=MicroBatch)
Found = Callable[[B], Tensor]
"""Computes something of a micro-batch, such as its loss, summed, by running the engine over it."""


class Runs(Protocol):
    """An engine, of a model that learns or of a frozen one."""

    @property
    def model(self) -> nn.Module:
        """The model, or what this process has of it."""
        ...

    @property
    def updates(self) -> int:
        """How often its weights have changed."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run its forward pass."""
        ...


class ForwardPasses:
    """The passes of a model that this process has whole."""

    def forward(self, batches: Iterable[B], found: Found[B]) -> list[Tensor]:
        """What is found of each batch; on the last stage alone, and none elsewhere.

        Without gradients where the caller has turned them off.
        """
        return [found(batch) for batch in batches]

    def forward_everywhere(
        self, batches: Sequence[B], found: Found[B], shape_of: Callable[[B], Sequence[int]]
    ) -> list[Tensor]:
        """What is found of each batch, on every stage, in fp32; `shape_of` says its shape."""
        del shape_of
        return [each.float() for each in self.forward(batches, found)]

    def from_last(self, value: T) -> T:
        """What the last stage has, on every stage; something small."""
        return value

    def total(self, losses: Sequence[Tensor]) -> float:
        """The sum of what `forward` gave, on every stage, read from the device."""
        return sum(read_scalars(losses))


@dataclass
class Waiting:
    """A micro-batch that has gone forward here and may go back."""

    output: Tensor
    """Hidden states, or on the last stage the loss."""

    received: Tensor | None
    tied: Tensor | None


class StagedForwardPasses(ForwardPasses):
    """The passes of a stage of a pipeline, in step with those of the others.

    A weight that the last stage shares with the first has one home, the first stage. The last one
    has a copy of it, which follows.

    Args:
        engine: of the stage.
        stage: what the process has of the model.
        stages: the processes that have the stages.
        passage: what hands hidden states on where the engine's own model ends with the head; the
            engine without it.
    """

    def __init__(
        self, engine: Runs, stage: Stage, stages: Group, passage: nn.Module | None = None
    ) -> None:
        self._run = engine
        self._pass_on: Callable[[TokenBatch], Tensor] = engine if passage is None else passage
        self._stage, self._stages = stage, stages
        self._transfers = Transfers(stages)
        self._waiting: dict[tuple[int, int], Waiting] = {}
        """By micro-batch and chunk."""
        self._places: Places | None = None
        """Of all passes, while all stages go through orders that are known."""
        self._followed = -1
        """How often the weights had changed when the last stage's copy was brought up to date."""

    def forward(self, batches: Iterable[B], found: Found[B]) -> list[Tensor]:
        """What is found of each batch; only the last stage has it."""
        self._follow()
        batches, outputs = list(batches), list[Tensor]()
        for number, chunk in turns(self._stage.count, len(batches), len(self._stage.chunks)):
            batch, at = batches[number], Instruction("forward", number, chunk)
            outputs += self._forward(at, batch.tokens, lambda batch=batch: found(batch))
            self._waiting.clear()
            self._transfers.settle(but=AHEAD)
        self._transfers.settle()
        return outputs

    def forward_everywhere(
        self, batches: Sequence[B], found: Found[B], shape_of: Callable[[B], Sequence[int]]
    ) -> list[Tensor]:
        """What is found of each batch, on every stage, in fp32."""
        outputs = self.forward(batches, found)
        shapes = [torch.Size(shape_of(batch)) for batch in batches]
        together = torch.empty(sum(each.numel() for each in shapes), device=local_device())
        parts = together.split([each.numel() for each in shapes])
        for part, output in zip(parts, outputs, strict=self._stage.is_last):
            part.copy_(output.reshape(-1))
        self.shared(together)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def from_last(self, value: T) -> T:
        """What the last stage has, on every stage."""
        return self._stages.gather_objects(value if self._stage.is_last else None)[-1]  # pyright: ignore[reportReturnType]

    def total(self, losses: Sequence[Tensor]) -> float:
        """The sum of the last stage's losses, on every stage."""
        return self._stages.sum(super().total(losses))

    def everywhere(self, batch: TokenBatch, found: Callable[[], Tensor], out: Tensor) -> Tensor:
        """What `found` computes on the last stage from a batch, on every stage; in `out`."""
        self._follow()
        for chunk in range(len(self._stage.chunks)):
            for output in self._forward(Instruction("forward", 0, chunk), batch, found):
                out.copy_(output)
            self._waiting.clear()
        self._transfers.settle()
        return self.shared(out)

    def shared(self, tensor: Tensor) -> Tensor:
        """The last stage's tensor, on every stage."""
        self._stages.broadcast(tensor, source=self._stages.size - 1)
        return tensor

    def _forward(
        self, at: Instruction, batch: TokenBatch, found: Callable[[], Tensor]
    ) -> list[Tensor]:
        """Take a micro-batch on; on the last stage, where it ends, what is found there."""
        stage, number, chunk = self._stage, at.micro_batch, self._stage.chunks[at.chunk]
        received: Tensor | None = None
        if isinstance(self._run.model, Policy):  # before it has what came for this micro-batch
            self._run.model.settle(batch)
        if chunk.inlet is not None:
            received = torch.empty(
                1, batch.num_tokens, stage.width, dtype=stage.dtype, device=batch.input_ids.device
            )
            self._receive(received, "hidden states", number, chunk, from_chunk=chunk.number - 1)
            chunk.inlet.received = received.requires_grad_(torch.is_grad_enabled())
        with chunk.at_work():
            output = found() if chunk.is_last else self._pass_on(batch)
        tied = stage.tied if chunk.is_first else None
        tied = None if tied is None else tied.view_as(tied)
        self._waiting[number, at.chunk] = Waiting(output, received, tied)
        if chunk.is_last:
            return [output.detach()]
        self._send(output, "hidden states", number, chunk.number + 1)
        return []

    def _send(self, tensor: Tensor, what: What, number: int, to_chunk: int) -> None:
        """Send a micro-batch's tensor to the stage that has this chunk of the whole model."""
        to, taken_at = to_chunk % self._stage.count, self._taken_at(what, number, to_chunk)
        self._transfers.send(tensor, to, what, number, to_chunk, taken_at=taken_at)

    def _receive(
        self, out: Tensor, what: What, number: int, chunk: Chunk, *, from_chunk: int
    ) -> None:
        """Have in `out` what comes for one of this stage's chunks from another chunk."""
        stage = from_chunk % self._stage.count
        self._transfers.receive(out, stage, what, number, chunk.number)
        if self._places is not None:
            for other, place in self._places.passed(what, number, from_chunk):
                self._transfers.reached(other, place)

    def _taken_at(self, what: What, number: int, chunk: int) -> int | None:
        """Where in its order the stage that has this chunk of the whole model takes a tensor."""
        return None if self._places is None else self._places.of(what, number, chunk)[1]

    def _follow(self) -> None:
        """Have the last stage's copy of a shared weight be what the first stage has now."""
        stage, updates = self._stage, self._run.updates
        if self._followed == updates:
            return
        self._followed = updates
        if stage.tied is not None:
            self._transfers.send(stage.tied, stage.count - 1, "tied weights", updates)
            self._transfers.settle()
        if stage.borrowed is not None:
            self._transfers.receive(stage.borrowed.detach(), 0, "tied weights", updates)
