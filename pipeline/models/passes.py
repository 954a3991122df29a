"""The passes of a step over its micro-batches, on one process or through the stages of a pipeline.

A step says what its loss is, and goes on as if the model were whole: losses come back on every
stage.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.config import ParallelConfig
from pipeline.data.batches import TokenBatch
from pipeline.engine.engine import Engine
from pipeline.models.stages import Stage, blocks_of, cut_stage
from pipeline.parallel.group import Group
from pipeline.parallel.schedules import Instruction, Schedule, instructions
from pipeline.parallel.transfer import Transfers

AHEAD = 4
"""Micro-batches that a stage may be ahead of the next one, where none goes back."""

LossOf = Callable[[TokenBatch], Tensor]
"""The loss of a micro-batch, summed; it runs the engine over it."""


class Passes:
    """The passes of a model that this process has whole."""

    bubble: float | None = None
    """Share of the last optimizer step's passes in which stages waited for each other."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def metrics(self) -> dict[str, float]:
        """What a step's line in metrics.jsonl says of them."""
        return {} if self.bubble is None else {"bubble": self.bubble}

    def learn(self, batches: Sequence[TokenBatch], loss_of: LossOf, *, divisor: float) -> float:
        """Add the gradients of all losses, each divided; the sum of the losses."""
        total = 0.0
        for batch in batches:
            loss = loss_of(batch)
            self.engine.backward(loss / divisor)
            total += loss.item()
        return total

    def ask(self, batches: Sequence[TokenBatch], loss_of: LossOf) -> float:
        """The sum of the losses, without gradients: in evaluation mode."""
        return sum(loss_of(batch).item() for batch in batches)


@dataclass
class _Waiting:
    """A micro-batch that has gone forward here and will go back."""

    output: Tensor
    """Hidden states, or on the last stage the loss."""

    received: Tensor | None
    tied: Tensor | None


class StagedPasses(Passes):
    """The passes of a stage of a pipeline, in step with those of the others.

    A weight that the last stage shares with the first has one home, the first stage. The last one
    has a copy of it, and sends the gradient that each micro-batch finds for it to the first, where
    autograd adds it to the embedding's, as it does in one process.
    """

    def __init__(self, engine: Engine, stage: Stage, stages: Group, schedule: Schedule) -> None:
        super().__init__(engine)
        self._stage, self._stages = stage, stages
        self._schedule: Schedule = schedule
        self._transfers = Transfers(stages)
        self._waiting: dict[int, _Waiting] = {}
        self._followed = -1
        """How often the weights had changed when the last stage's copy was brought up to date."""

    def learn(self, batches: Sequence[TokenBatch], loss_of: LossOf, *, divisor: float) -> float:
        """As one process does, in the order of the schedule; every stage returns the sum."""
        began, self._transfers.waited = time.perf_counter(), 0.0
        self._follow()
        order = instructions(
            self._schedule,
            stage=self._stage.number,
            stages=self._stage.count,
            count=len(batches),
        )
        total = 0.0
        for each in order:
            if each.kind == "forward":
                loss = self._forward(each, batches[each.micro_batch], loss_of)
                total += 0.0 if loss is None else loss.item()
            else:
                self._back(each.micro_batch, divisor)
        self._transfers.settle()
        elapsed = time.perf_counter() - began
        total, waited, elapsed = self._stages.sums([total, self._transfers.waited, elapsed])
        self.bubble = waited / elapsed
        return total

    def ask(self, batches: Sequence[TokenBatch], loss_of: LossOf) -> float:
        """As one process does; every stage returns the sum."""
        self._follow()
        total = 0.0
        for number, batch in enumerate(batches):
            loss = self._forward(Instruction("forward", number), batch, loss_of)
            total += 0.0 if loss is None else loss.item()
            self._waiting.clear()
            self._transfers.settle(but=AHEAD)
        self._transfers.settle()
        return self._stages.sum(total)

    def _forward(self, at: Instruction, batch: TokenBatch, loss_of: LossOf) -> Tensor | None:
        """Take a micro-batch on; its loss on the last stage."""
        stage, number = self._stage, at.micro_batch
        received: Tensor | None = None
        if stage.inlet is not None:
            received = torch.empty(
                1, batch.num_tokens, stage.width, dtype=stage.dtype, device=batch.input_ids.device
            )
            self._transfers.receive(received, stage.number - 1, "hidden states", number)
            stage.inlet.received = received.requires_grad_(torch.is_grad_enabled())
        if stage.is_last:
            loss = loss_of(batch)
            self._waiting[number] = _Waiting(loss, received, None)
            return loss
        hidden: Tensor = self.engine(batch)
        tied = None if stage.tied is None else stage.tied.view_as(stage.tied)
        self._waiting[number] = _Waiting(hidden, received, tied)
        self._transfers.send(hidden, stage.number + 1, "hidden states", number)
        return None

    def _back(self, number: int, divisor: float) -> None:
        """Go back through a micro-batch, and hand on the gradient of what was received."""
        stage, waiting = self._stage, self._waiting.pop(number)
        if stage.is_last:
            self.engine.backward(waiting.output / divisor)
            self._send_tied(number)
        else:
            roots = [waiting.output]
            gradients = [torch.empty_like(waiting.output)]
            self._transfers.receive(gradients[0], stage.number + 1, "gradients", number)
            if waiting.tied is not None and waiting.tied.requires_grad:
                roots.append(waiting.tied)
                gradients.append(torch.empty_like(waiting.tied))
                self._transfers.receive(gradients[1], stage.count - 1, "tied gradients", number)
            self.engine.backward_from(roots, gradients)
        if waiting.received is not None:
            gradient = waiting.received.grad
            gradient = torch.zeros_like(waiting.received) if gradient is None else gradient
            self._transfers.send(gradient, stage.number - 1, "gradients", number)

    def _send_tied(self, number: int) -> None:
        """Send the first stage what this micro-batch found for the weight it has."""
        borrowed = self._stage.borrowed
        if borrowed is None or not borrowed.requires_grad:
            return
        gradient, borrowed.grad = borrowed.grad, None
        gradient = torch.zeros_like(borrowed) if gradient is None else gradient
        self._transfers.send(gradient, 0, "tied gradients", number)

    def _follow(self) -> None:
        """Have the last stage's copy of a shared weight be what the first stage has now."""
        stage, updates = self._stage, self.engine.zero.updates
        if self._followed == updates:
            return
        self._followed = updates
        if stage.tied is not None:
            self._transfers.send(stage.tied, stage.count - 1, "tied weights", updates)
            self._transfers.settle()
        if stage.borrowed is not None:
            self._transfers.receive(stage.borrowed.detach(), 0, "tied weights", updates)


def own_stage(model: nn.Module, parallel: ParallelConfig, stages: Group) -> Stage:
    """This process's stage of a model, which is left without what others have.

    Raises:
        ConfigError: the model can't be cut as the settings say.
        ModelError: models of its family can't be cut.
    """
    if stages.size == 1:
        return Stage()
    blocks = blocks_of(model, stages.size, parallel.partition)
    return cut_stage(model, number=stages.rank, blocks=blocks)


def passes_of(engine: Engine, stage: Stage, parallel: ParallelConfig, stages: Group) -> Passes:
    """The passes of a model in an engine, whole or a stage."""
    if stages.size == 1:
        return Passes(engine)
    return StagedPasses(engine, stage, stages, parallel.schedule)
