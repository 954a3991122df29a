"""Passes over a step's micro-batches, on one process or through the stages of a pipeline.

A step passes its loss function, and runs as if the model were not split: all stages get the losses.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.config import Kernels, ParallelConfig, TrainedModelConfig
from pipeline.data.batches import TokenBatch
from pipeline.engine.engine import Engine, FrozenEngine
from pipeline.models.forward.forward import Policy, Scorer
from pipeline.models.hf.load import align_weights
from pipeline.models.parallel.stages import Stage, StageModule, cut_stage, find_blocks
from pipeline.models.parallel.tensor_parallel import cut_layers, cut_where_possible
from pipeline.models.trained import prepare_causal_lm
from pipeline.parallel.device import local_device, read_scalars
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.schedules import make_schedule, max_in_flight
from pipeline.parallel.transfer import Transfers
from pipeline.system.errors import ConfigError, ModelError

AHEAD = 4
"""Micro-batches by which a stage may be ahead of the next one in passes without gradients."""


class MicroBatch(Protocol):
    """Rows that are run together."""

    @property
    def tokens(self) -> TokenBatch:
        """The sequences of the rows."""
        ...


T = TypeVar("T")
B = TypeVar("B", bound=MicroBatch)
Found = Callable[[B], Tensor]
"""Computes a result of a micro-batch with the engine, such as its summed loss."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients: no checkpointing, no adapter dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


class ForwardPasses:
    """The passes of a complete model."""

    def forward(self, batches: Iterable[B], found: Found[B]) -> list[Tensor]:
        """Return `found` of each batch on the last stage, and nothing on the others.

        No gradients are computed within `evaluating`.
        """
        return [found(batch) for batch in batches]

    def forward_everywhere(
        self, batches: Sequence[B], found: Found[B], shape_of: Callable[[B], Sequence[int]]
    ) -> list[Tensor]:
        """Return `found` of each batch on every stage, in fp32; `shape_of` gives its shape."""
        del shape_of
        return [each.float() for each in self.forward(batches, found)]

    def from_last(self, value: T) -> T:
        """Return the last stage's `value`, a small object, on every stage."""
        return value

    def total(self, losses: Sequence[Tensor]) -> float:
        """Sum of the results of `forward`, on every stage, read from the device."""
        return sum(read_scalars(losses))


@dataclass
class Waiting:
    """A micro-batch after its forward pass, possibly with a pending backward pass."""

    output: Tensor
    """Hidden states, or the loss on the last stage."""

    received: Tensor | None
    tied: Tensor | None


class StagedForwardPasses(ForwardPasses):
    """The passes of a pipeline stage, in step with the other stages.

    A weight tied between the first and last stage is trained on the first; the last stage has a
    copy that is kept up to date.

    Args:
        engine: the stage's engine.
        stage: the process's part of the model.
        stages: the processes of the pipeline.
    """

    def __init__(self, engine: Engine | FrozenEngine, stage: Stage, stages: Group) -> None:
        self._run = engine
        self._stage, self._stages = stage, stages
        self._transfers = Transfers(stages)
        self._waiting: dict[int, Waiting] = {}
        """Pending backward passes by micro-batch."""
        self._followed = -1
        """Number of weight updates when the last stage's copy was last updated."""

    def forward(self, batches: Iterable[B], found: Found[B]) -> list[Tensor]:
        """Return the results of the batches; only the last stage has them."""
        self._follow()
        outputs: list[Tensor] = []
        for number, batch in enumerate(batches):
            outputs += self._forward(number, batch.tokens, lambda batch=batch: found(batch))
            self._waiting.clear()
            self._transfers.wait(except_last=AHEAD)
        self._transfers.wait()
        return outputs

    def forward_everywhere(
        self, batches: Sequence[B], found: Found[B], shape_of: Callable[[B], Sequence[int]]
    ) -> list[Tensor]:
        """Return the results of the batches on every stage, in fp32."""
        outputs = self.forward(batches, found)
        shapes = [torch.Size(shape_of(batch)) for batch in batches]
        together = torch.empty(sum(each.numel() for each in shapes), device=local_device())
        parts = together.split([each.numel() for each in shapes])
        for part, output in zip(parts, outputs, strict=self._stage.is_last):
            part.copy_(output.reshape(-1))
        self.shared(together)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def from_last(self, value: T) -> T:
        """Return the last stage's `value` on every stage."""
        return self._stages.gather_objects(value if self._stage.is_last else None)[-1]  # pyrefly: ignore[bad-return]

    def total(self, losses: Sequence[Tensor]) -> float:
        """The sum of the last stage's losses, on every stage."""
        return self._stages.sum(super().total(losses))

    def everywhere(self, batch: TokenBatch, found: Callable[[], Tensor], out: Tensor) -> Tensor:
        """Return the last stage's `found()` for a batch on every stage, in `out`."""
        self._follow()
        for output in self._forward(0, batch, found):
            out.copy_(output)
        self._waiting.clear()
        self._transfers.wait()
        return self.shared(out)

    def shared(self, tensor: Tensor) -> Tensor:
        """The last stage's tensor, on every stage."""
        self._stages.broadcast(tensor, source=self._stages.size - 1)
        return tensor

    def _forward(self, number: int, batch: TokenBatch, found: Callable[[], Tensor]) -> list[Tensor]:
        """Run the forward pass of a micro-batch; on the last stage return the result of `found`."""
        stage = self._stage
        received: Tensor | None = None
        if isinstance(self._run.model, Policy):  # before it receives this micro-batch
            self._run.model.settle(batch)
        if stage.inlet is not None:
            received = torch.empty(
                1, batch.num_tokens, stage.width, dtype=stage.dtype, device=batch.input_ids.device
            )
            self._transfers.receive(received, stage.number - 1, "hidden states", number)
            stage.inlet.received = received.requires_grad_(torch.is_grad_enabled())
        output = found() if stage.is_last else self._run(batch)
        tied = None if stage.tied is None else stage.tied.view_as(stage.tied)
        self._waiting[number] = Waiting(output, received, tied)
        if stage.is_last:
            return [output.detach()]
        self._transfers.send(output, stage.number + 1, "hidden states")
        return []

    def _follow(self) -> None:
        """Update the last stage's copy of a tied weight, if weights have changed since."""
        stage, updates = self._stage, self._run.updates
        if self._followed == updates:
            return
        self._followed = updates
        if stage.tied is not None:
            self._transfers.send(stage.tied, stage.count - 1, "tied weights")
            self._transfers.wait()
        if stage.borrowed is not None:
            self._transfers.receive(stage.borrowed.detach(), 0, "tied weights", updates)


logger = logging.getLogger(__name__)


class Passes(ForwardPasses):
    """Forward and backward passes of a complete model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step's passes. A collective."""
        return {}

    def learn(
        self, batches: Iterable[B], compute_loss: Found[B], *, divisor: float
    ) -> list[Tensor]:
        """Add the gradients of all losses, divided by `divisor`; return the losses for `total`."""
        losses: list[Tensor] = []
        for batch in batches:
            loss = compute_loss(batch)
            self.engine.backward(loss / divisor)
            losses.append(loss.detach())
        return losses


class StagedPasses(StagedForwardPasses, Passes):
    """The passes of a trained pipeline stage, in step with the other stages.

    The last stage sends each micro-batch's gradient of its copy of a tied weight to the first,
    where autograd adds it to the embedding's, as in a single process.
    """

    def __init__(self, engine: Engine, stage: Stage, stages: Group) -> None:
        Passes.__init__(self, engine)
        StagedForwardPasses.__init__(self, engine, stage, stages)
        self._took = 0.0
        """Seconds of the passes in the last optimizer step."""

    def learn(
        self, batches: Iterable[B], compute_loss: Found[B], *, divisor: float
    ) -> list[Tensor]:
        """Add all gradients in the order of the schedule; only the last stage returns losses."""
        began, self._transfers.wait_seconds = time.perf_counter(), 0.0
        self._follow()
        batches = list(batches)
        stage, count = self._stage.number, self._stage.count
        losses: list[Tensor] = []
        for at in make_schedule(stage=stage, stages=count, count=len(batches)):
            if at.kind == "forward":
                batch = batches[at.micro_batch]
                losses += self._forward(
                    at.micro_batch, batch.tokens, lambda batch=batch: compute_loss(batch)
                )
            else:
                self._backward(at.micro_batch, divisor)
            self._transfers.wait(except_last=max_in_flight(count))
        self._transfers.wait()
        self._took = time.perf_counter() - began
        return losses

    def metrics(self) -> dict[str, float]:
        """`bubble`: the average fraction of the passes' time for which a stage was idle."""
        wait_seconds, took = self._stages.sums([self._transfers.wait_seconds, self._took])
        return {"bubble": wait_seconds / max(took, 1e-9)}

    def _backward(self, number: int, divisor: float) -> None:
        """Run the backward pass of a micro-batch, and send the gradient of the received input."""
        stage, waiting = self._stage, self._waiting.pop(number)
        if stage.is_last:
            self.engine.backward(waiting.output / divisor)
            self._send_tied()
        else:
            roots, gradients = [waiting.output], [torch.empty_like(waiting.output)]
            self._transfers.receive(gradients[0], stage.number + 1, "gradients", number)
            if waiting.tied is not None and waiting.tied.requires_grad:
                roots.append(waiting.tied)
                gradients.append(torch.empty_like(waiting.tied))
                self._transfers.receive(gradients[1], stage.count - 1, "tied gradients", number)
            if any(root.requires_grad for root in roots):
                self.engine.backward_from(roots, gradients, blocks_only=not stage.is_first)
        if waiting.received is not None:
            gradient = waiting.received.grad
            gradient = torch.zeros_like(waiting.received) if gradient is None else gradient
            self._transfers.send(gradient, stage.number - 1, "gradients")

    def _send_tied(self) -> None:
        """Send the first stage the micro-batch's gradient of the tied weight."""
        borrowed = self._stage.borrowed
        if borrowed is None or not borrowed.requires_grad:
            return
        gradient, borrowed.grad = borrowed.grad, None
        gradient = torch.zeros_like(borrowed) if gradient is None else gradient
        self._transfers.send(gradient, 0, "tied gradients")


def own_part(
    model: nn.Module,
    stages: Group,
    whole: Callable[[nn.Module], nn.Module],
    *,
    kernels: Kernels,
    passing: Callable[[StageModule], nn.Module] | None = None,
) -> tuple[nn.Module, Stage]:
    """The module for this process's engine, and its stage; other stages are removed from `model`.

    Args:
        model: the Hugging Face model.
        stages: the processes of the pipeline.
        whole: wraps a model with its head for the engine.
        kernels: the setting for a stage without the head.
        passing: wraps a stage without the head for the engine, if its parameters have other names
            than those of `whole`.

    Raises:
        ConfigError: the model has fewer blocks than stages.
        ModelError: models of its family can't be split.
    """
    if stages.size == 1:
        return whole(model), Stage()
    blocks = find_blocks(model, stages.size)
    stage = cut_stage(model, number=stages.rank, blocks=blocks)
    if stage.is_last:
        return whole(model), stage
    passage = StageModule(model, kernels=kernels)
    return (passage if passing is None else passing(passage)), stage


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
    """A trained language model, or this process's stage of it, with its engine.

    Raises:
        ConfigError: the model can't be split as in the settings.
        ModelError: the model can't be used, or its family can't be split.
    """
    model = prepare_causal_lm(settings, tokenizer, device=local_device(), seed=seed)
    passes = make_passes(
        model,
        settings,
        parallel,
        mesh,
        lambda whole: Policy(whole, kernels=settings.kernels),
        total_steps=total_steps,
        name=name,
    )
    return model, passes


def make_passes(
    model: nn.Module,
    settings: TrainedModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    whole: Callable[[nn.Module], nn.Module],
    *,
    total_steps: int,
    name: str,
    passing: Callable[[StageModule], nn.Module] | None = None,
) -> Passes:
    """The passes of a trained model, or of this process's part of it, with an engine.

    See `own_part` for `whole` and `passing`.

    Raises:
        ConfigError, ModelError: as `own_part` and `cut_layers`.
    """
    stages = mesh.stages
    cut_layers(model, mesh.tensor, sequence=parallel.sequence)
    part, stage = own_part(model, stages, whole, kernels=settings.kernels, passing=passing)
    engine = Engine(
        part,
        settings,
        total_steps=total_steps,
        name=name,
        group=mesh.data,
        model_parallel=mesh.model_parallel,
        tensor=mesh.tensor,
        stages=stages,
    )
    if stages.size == 1:
        return Passes(engine)
    return StagedPasses(engine, stage, stages)


def frozen_passes(
    model: PreTrainedModel,
    like: TrainedModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    whole: Callable[[nn.Module], nn.Module],
    *,
    name: str,
) -> tuple[FrozenEngine, ForwardPasses]:
    """An engine for a frozen model with the settings of the trained model `like`, and its passes.

    The model is sharded like the trained models or, if that is not possible, as for an encoder,
    replicated on each process. See `own_part` for `whole`.
    """
    stages = mesh.stages
    cut_where_possible(model, mesh.tensor, sequence=parallel.sequence)
    if stages.size == 1:
        if like.zero_stage < 3:  # at stage 3 the engine moves its shards
            _move(model)
        return FrozenEngine(whole(model), like, name=name), ForwardPasses()
    try:
        part, stage = own_part(model, stages, whole, kernels=like.kernels)
    except (ConfigError, ModelError) as error:
        logger.info("each process has a full copy of the %s: %s", name, error)
        part, stage = whole(model), Stage()
    _move(model)
    engine = FrozenEngine(part, like, name=name)
    if stage.count == 1:
        return engine, ForwardPasses()
    return engine, StagedForwardPasses(engine, stage, stages)


def _move(model: nn.Module) -> None:
    """Move a model that was loaded with `defer` to the device."""
    nn.Module.to(model, local_device())
    align_weights(model)


class StagedScorer(Scorer):
    """Runs a batch through the stages in order. A collective of the stages.

    Args:
        passes: the passes of the stages.
        model: the Hugging Face model, of which this process has a stage.
    """

    def __init__(self, passes: StagedPasses, model: nn.Module) -> None:
        super().__init__(model)
        self._passes = passes
        self._part = passes.engine.model

    def _logits(self, classifier: PreTrainedModel, batch: TokenBatch) -> Tensor:
        num_labels = int(classifier.config.num_labels or 1)
        out = torch.empty(batch.num_tokens, num_labels, device=batch.input_ids.device)
        return self._passes.everywhere(batch, lambda: self._of_last(batch), out)

    def _of_last(self, batch: TokenBatch) -> Tensor:
        assert isinstance(self._part, Scorer)
        return self._part(batch, labels=True)


def scorer_of(passes: Passes, model: nn.Module) -> Scorer:
    """Return the scorer for evaluations: the trained one, or one over its stages."""
    if isinstance(passes, StagedPasses):
        return StagedScorer(passes, model)
    assert isinstance(passes.engine.model, Scorer)
    return passes.engine.model
