"""The passes of a step over its micro-batches, on one process or through the stages of a pipeline.

A step says what its loss is, and goes on as if the model were whole: losses come back on every
stage.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from pipeline.config import Kernels, ParallelConfig, TrainedModelConfig
from pipeline.data.batches import TokenBatch
from pipeline.engine.engine import Engine
from pipeline.models.forward import Policy
from pipeline.models.stages import Passage, Stage, blocks_of, cut_stage
from pipeline.models.tensor_cut import cut_layers
from pipeline.models.trained import trained_causal_lm
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.schedules import Instruction, Schedule, instructions
from pipeline.parallel.transfer import Transfers
from pipeline.scalars import read_scalars

AHEAD = 4
"""Micro-batches that a stage may be ahead of the next one, where none goes back."""


class MicroBatch(Protocol):
    """Rows that are run together."""

    @property
    def tokens(self) -> TokenBatch:
        """Their sequences."""
        ...


B = TypeVar("B", bound=MicroBatch)
LossOf = Callable[[B], Tensor]
"""The loss of a micro-batch, summed; it runs the engine over its tokens."""


class Passes:
    """The passes of a model that this process has whole."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def metrics(self) -> dict[str, float]:
        """What a step's line in metrics.jsonl says of its passes; all processes call it."""
        return {}

    def total(self, losses: Sequence[Tensor]) -> float:
        """The sum of the losses of a list, read from the device."""
        return sum(read_scalars(losses))

    def learn(self, batches: Iterable[B], loss_of: LossOf[B], *, divisor: float) -> list[Tensor]:
        """Add the gradients of all losses, each divided; the losses, for `total`."""
        losses: list[Tensor] = []
        for batch in batches:
            loss = loss_of(batch)
            self.engine.backward(loss / divisor)
            losses.append(loss.detach())
        return losses

    def ask(self, batches: Iterable[B], loss_of: LossOf[B]) -> list[Tensor]:
        """The losses without gradients, in evaluation mode, for `total`."""
        return [loss_of(batch) for batch in batches]


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
        self._took = 0.0
        """Seconds of the passes of the last optimizer step."""
        self._followed = -1
        """How often the weights had changed when the last stage's copy was brought up to date."""

    def learn(self, batches: Iterable[B], loss_of: LossOf[B], *, divisor: float) -> list[Tensor]:
        """As one process does, in the order of the schedule; only the last stage has losses."""
        began, self._transfers.waited = time.perf_counter(), 0.0
        self._follow()
        batches = list(batches)
        order = instructions(
            self._schedule,
            stage=self._stage.number,
            stages=self._stage.count,
            count=len(batches),
        )
        losses: list[Tensor] = []
        for each in order:
            if each.kind == "forward":
                batch = batches[each.micro_batch]
                losses += self._forward(each, batch.tokens, lambda batch=batch: loss_of(batch))
            else:
                self._back(each.micro_batch, divisor)
        self._transfers.settle()
        self._took = time.perf_counter() - began
        return losses

    def ask(self, batches: Iterable[B], loss_of: LossOf[B]) -> list[Tensor]:
        """As one process does; only the last stage has losses."""
        self._follow()
        losses: list[Tensor] = []
        for number, batch in enumerate(batches):
            at = Instruction("forward", number)
            losses += self._forward(at, batch.tokens, lambda batch=batch: loss_of(batch))
            self._waiting.clear()
            self._transfers.settle(but=AHEAD)
        self._transfers.settle()
        return losses

    def total(self, losses: Sequence[Tensor]) -> float:
        """The sum of the last stage's losses, on every stage."""
        return self._stages.sum(super().total(losses))

    def metrics(self) -> dict[str, float]:
        """`bubble`: the share of the step's passes in which stages waited for each other."""
        waited, took = self._stages.sums([self._transfers.waited, self._took])
        return {"bubble": waited / max(took, 1e-9)}

    def everywhere(self, batch: TokenBatch, found: Callable[[], Tensor], out: Tensor) -> Tensor:
        """What `found` computes on the last stage from a batch, on every stage; in `out`."""
        self._follow()
        for output in self._forward(Instruction("forward", 0), batch, found):
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
        stage, number = self._stage, at.micro_batch
        received: Tensor | None = None
        if isinstance(self.engine.model, Policy):  # before it has what came for this micro-batch
            self.engine.model.settle(batch)
        if stage.inlet is not None:
            received = torch.empty(
                1, batch.num_tokens, stage.width, dtype=stage.dtype, device=batch.input_ids.device
            )
            self._transfers.receive(received, stage.number - 1, "hidden states", number)
            stage.inlet.received = received.requires_grad_(torch.is_grad_enabled())
        if stage.is_last:
            loss = found()
            self._waiting[number] = _Waiting(loss, received, None)
            return [loss.detach()]
        hidden: Tensor = self.engine(batch)
        tied = None if stage.tied is None else stage.tied.view_as(stage.tied)
        self._waiting[number] = _Waiting(hidden, received, tied)
        self._transfers.send(hidden, stage.number + 1, "hidden states", number)
        return []

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


def own_part(
    model: nn.Module,
    parallel: ParallelConfig,
    stages: Group,
    whole: Callable[[nn.Module], nn.Module],
    *,
    kernels: Kernels,
) -> tuple[nn.Module, Stage]:
    """This process's stage of a model, which is left without what others have.

    Args:
        model: the Hugging Face model.
        parallel: how it is cut.
        stages: the processes that have the stages.
        whole: makes of a model that ends with its head what the engine runs.
        kernels: of a stage without the head.

    Raises:
        ConfigError: the model can't be cut as the settings say.
        ModelError: models of its family can't be cut.
    """
    if stages.size == 1:
        return whole(model), Stage()
    blocks = blocks_of(model, stages.size, parallel.partition)
    stage = cut_stage(model, number=stages.rank, blocks=blocks)
    return whole(model) if stage.is_last else Passage(model, kernels=kernels), stage


def learning_model(
    settings: TrainedModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    parallel: ParallelConfig,
    mesh: Mesh,
    *,
    total_steps: int,
    seed: int,
    name: str,
) -> tuple[nn.Module, Passes]:
    """A language model that learns, whole or this process's stage of it, in an engine.

    Raises:
        ConfigError: it can't be cut as the settings say.
        ModelError: it can't be used, or its family can't be cut.
    """
    model = trained_causal_lm(settings, tokenizer, device=local_device(), seed=seed, defer=True)
    passes = passes_of(
        model,
        settings,
        parallel,
        mesh,
        lambda whole: Policy(whole, kernels=settings.kernels),
        total_steps=total_steps,
        name=name,
    )
    return model, passes


def passes_of(
    model: nn.Module,
    settings: TrainedModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    whole: Callable[[nn.Module], nn.Module],
    *,
    total_steps: int,
    name: str,
) -> Passes:
    """The passes of a model that learns, whole or this process's part of it, in an engine.

    `whole` is that of `own_part`.

    Raises:
        ConfigError, ModelError: as `own_part` and `cut_layers`.
    """
    stages = mesh.stages
    cut_layers(model, mesh.tensor)
    part, stage = own_part(model, parallel, stages, whole, kernels=settings.kernels)
    engine = Engine(
        part,
        settings,
        total_steps=total_steps,
        name=name,
        group=mesh.data,
        parts=mesh.parts,
        tensor=mesh.tensor,
    )
    if stages.size == 1:
        return Passes(engine)
    return StagedPasses(engine, stage, stages, parallel.schedule)
