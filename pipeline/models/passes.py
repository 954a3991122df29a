"""Runs a model over a step's micro-batches, on one process or through the stages of a pipeline.

A step supplies its loss function as if the model were not split; `total` returns the sum of the
losses on every stage.
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
from pipeline.models.forward.forward import Policy, Scorer, set_fp32_logits
from pipeline.models.hf.load import align_weights
from pipeline.models.parallel.stages import PipelineStage, StageModule, balance_blocks, build_stage
from pipeline.models.parallel.tensor_parallel import shard_if_possible, shard_layers
from pipeline.models.trained import prepare_causal_lm
from pipeline.parallel.device import local_device, read_scalars
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.schedules import make_schedule, max_in_flight
from pipeline.parallel.transfer import Transfers
from pipeline.system.errors import ConfigError, ModelError

MAX_AHEAD = 4
"""Number of micro-batches that a stage may be ahead of the next in passes without gradients."""


class MicroBatch(Protocol):
    """Sequences that share a forward and a backward pass."""

    @property
    def tokens(self) -> TokenBatch:
        """The tokens of the sequences."""
        ...


T = TypeVar("T")
B = TypeVar("B", bound=MicroBatch)
BatchFn = Callable[[B], Tensor]
"""Computes a result of a micro-batch with the engine, such as its summed loss."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients: no checkpointing and no adapter dropout."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


class ForwardPasses:
    """Forward passes of a complete model."""

    def forward(self, batches: Iterable[B], fn: BatchFn[B]) -> list[Tensor]:
        """Apply `fn` to each batch; only the last stage of a pipeline returns results.

        Use it within `evaluating` if no gradients are needed.
        """
        return [fn(batch) for batch in batches]

    def forward_everywhere(
        self, batches: Sequence[B], fn: BatchFn[B], get_shape: Callable[[B], Sequence[int]]
    ) -> list[Tensor]:
        """Return the results of `fn` on every stage, in fp32; `get_shape` returns their shapes."""
        del get_shape
        return [result.float() for result in self.forward(batches, fn)]

    def from_last_stage(self, value: T) -> T:
        """Return the last stage's `value`, a small object, on every stage."""
        return value

    def total(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of scalar results of `forward`, on every stage."""
        return sum(read_scalars(losses))


@dataclass
class PendingMicroBatch:
    """A micro-batch after its forward pass, possibly with a pending backward pass."""

    output: Tensor
    """Hidden states, or the loss on the last stage."""

    received: Tensor | None
    tied: Tensor | None


class StagedForwardPasses(ForwardPasses):
    """Forward passes of a pipeline stage, coordinated with those of the other stages.

    If the output layer is tied to the embedding, the weight is trained on the first stage; the last
    has a copy that is updated before forward passes. `stages` are the pipeline's processes.
    """

    def __init__(self, engine: Engine | FrozenEngine, stage: PipelineStage, stages: Group) -> None:
        self._engine = engine
        self._stage, self._stages = stage, stages
        self._transfers = Transfers(stages)
        self._pending: dict[int, PendingMicroBatch] = {}
        """Pending backward passes by micro-batch."""
        self._synced_at = -1
        """Number of weight updates when the last stage's copy was last updated."""

    def forward(self, batches: Iterable[B], fn: BatchFn[B]) -> list[Tensor]:
        """Return the batches' results on the last stage, and no results on other stages."""
        self._sync_tied_weight()
        outputs: list[Tensor] = []
        for index, batch in enumerate(batches):
            outputs += self._forward(index, batch.tokens, lambda batch=batch: fn(batch))
            self._pending.clear()
            self._transfers.wait(except_last=MAX_AHEAD)
        self._transfers.wait()
        return outputs

    def forward_everywhere(
        self, batches: Sequence[B], fn: BatchFn[B], get_shape: Callable[[B], Sequence[int]]
    ) -> list[Tensor]:
        """Return the results of the batches on every stage, in fp32."""
        outputs = self.forward(batches, fn)
        shapes = [torch.Size(get_shape(batch)) for batch in batches]
        flat = torch.empty(sum(shape.numel() for shape in shapes), device=local_device())
        views = flat.split([shape.numel() for shape in shapes])
        for view, output in zip(views, outputs, strict=self._stage.is_last):
            view.copy_(output.reshape(-1))
        self.broadcast_from_last(flat)
        return [view.view(shape) for view, shape in zip(views, shapes, strict=True)]

    def from_last_stage(self, value: T) -> T:
        """Return the last stage's `value` on every stage."""
        return self._stages.gather_objects(value if self._stage.is_last else None)[-1]  # pyrefly: ignore[bad-return]

    def total(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of the last stage's losses, on every stage."""
        return self._stages.sum(super().total(losses))

    def run_on_all_stages(self, batch: TokenBatch, fn: Callable[[], Tensor], out: Tensor) -> Tensor:
        """Return the last stage's result of `fn()` on every stage, in `out`."""
        self._sync_tied_weight()
        for output in self._forward(0, batch, fn):
            out.copy_(output)
        self._pending.clear()
        self._transfers.wait()
        return self.broadcast_from_last(out)

    def broadcast_from_last(self, tensor: Tensor) -> Tensor:
        """Copy the last stage's tensor to all stages, in place, and return it."""
        self._stages.broadcast(tensor, source=self._stages.size - 1)
        return tensor

    def _forward(self, index: int, batch: TokenBatch, fn: Callable[[], Tensor]) -> list[Tensor]:
        """Run the forward pass of a micro-batch; the last stage returns the result of `fn`."""
        stage = self._stage
        received: Tensor | None = None
        if isinstance(self._engine.model, Policy):  # before it receives this micro-batch
            self._engine.model.detect_linear_logits(batch)
        if stage.stage_input is not None:
            received = torch.empty(
                1, batch.num_tokens, stage.width, dtype=stage.dtype, device=batch.input_ids.device
            )
            self._transfers.receive(received, stage.number - 1, "hidden states", index)
            stage.stage_input.received = received.requires_grad_(torch.is_grad_enabled())
        output = fn() if stage.is_last else self._engine(batch)
        tied = None if stage.tied is None else stage.tied.view_as(stage.tied)
        self._pending[index] = PendingMicroBatch(output, received, tied)
        if stage.is_last:
            return [output.detach()]
        self._transfers.send(output, stage.number + 1, "hidden states")
        return []

    def _sync_tied_weight(self) -> None:
        """Update the last stage's copy of a tied weight if the weight has changed."""
        stage, updates = self._stage, self._engine.updates
        if self._synced_at == updates:
            return
        self._synced_at = updates
        if stage.tied is not None:
            self._transfers.send(stage.tied, stage.count - 1, "tied weights")
            self._transfers.wait()
        if stage.tied_copy is not None:
            self._transfers.receive(stage.tied_copy.detach(), 0, "tied weights")


logger = logging.getLogger(__name__)


class Passes(ForwardPasses):
    """Forward and backward passes of a complete model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step's passes; all processes must call this."""
        return {}

    def forward_backward(
        self, batches: Iterable[B], compute_loss: BatchFn[B], *, divisor: float
    ) -> list[Tensor]:
        """Accumulate the losses' gradients, divided by `divisor`; return the losses for `total`."""
        losses: list[Tensor] = []
        for batch in batches:
            loss = compute_loss(batch)
            self.engine.backward(loss / divisor)
            losses.append(loss.detach())
        return losses


class StagedPasses(StagedForwardPasses, Passes):
    """Forward and backward passes of a pipeline stage, coordinated with those of other stages.

    For each micro-batch, the last stage sends the gradient of its copy of a tied weight to the
    first stage, where autograd adds it to the embedding's, as in a single process.
    """

    def __init__(self, engine: Engine, stage: PipelineStage, stages: Group) -> None:
        Passes.__init__(self, engine)
        StagedForwardPasses.__init__(self, engine, stage, stages)
        self._seconds = 0.0
        """Duration of the passes in the last optimizer step, in seconds."""

    def forward_backward(
        self, batches: Iterable[B], compute_loss: BatchFn[B], *, divisor: float
    ) -> list[Tensor]:
        """Accumulate gradients in the schedule's order; only the last stage returns losses."""
        start, self._transfers.wait_seconds = time.perf_counter(), 0.0
        self._sync_tied_weight()
        batches = list(batches)
        stage, count = self._stage.number, self._stage.count
        losses: list[Tensor] = []
        for instruction in make_schedule(stage=stage, stages=count, count=len(batches)):
            if instruction.kind == "forward":
                batch = batches[instruction.micro_batch]
                losses += self._forward(
                    instruction.micro_batch, batch.tokens, lambda batch=batch: compute_loss(batch)
                )
            else:
                self._backward(instruction.micro_batch, divisor)
            self._transfers.wait(except_last=max_in_flight(count))
        self._transfers.wait()
        self._seconds = time.perf_counter() - start
        return losses

    def metrics(self) -> dict[str, float]:
        """Return `bubble`, the fraction of the passes' time that stages spent waiting."""
        wait_seconds, seconds = self._stages.sums([self._transfers.wait_seconds, self._seconds])
        return {"bubble": wait_seconds / max(seconds, 1e-9)}

    def _backward(self, index: int, divisor: float) -> None:
        """Run the backward pass of a micro-batch, and send the gradient of the received input."""
        stage, pending = self._stage, self._pending.pop(index)
        if stage.is_last:
            self.engine.backward(pending.output / divisor)
            self._send_tied_gradient()
        else:
            roots, gradients = [pending.output], [torch.empty_like(pending.output)]
            self._transfers.receive(gradients[0], stage.number + 1, "gradients", index)
            if pending.tied is not None and pending.tied.requires_grad:
                roots.append(pending.tied)
                gradients.append(torch.empty_like(pending.tied))
                self._transfers.receive(gradients[1], stage.count - 1, "tied gradients", index)
            if any(root.requires_grad for root in roots):
                self.engine.backward_from(roots, gradients, blocks_only=not stage.is_first)
        if pending.received is not None:
            gradient = pending.received.grad
            gradient = torch.zeros_like(pending.received) if gradient is None else gradient
            self._transfers.send(gradient, stage.number - 1, "gradients")

    def _send_tied_gradient(self) -> None:
        """Send the first stage the micro-batch's gradient of the tied weight."""
        tied_copy = self._stage.tied_copy
        if tied_copy is None or not tied_copy.requires_grad:
            return
        gradient, tied_copy.grad = tied_copy.grad, None
        gradient = torch.zeros_like(tied_copy) if gradient is None else gradient
        self._transfers.send(gradient, 0, "tied gradients")


def make_stage_module(
    model: nn.Module,
    stages: Group,
    wrap_model: Callable[[nn.Module], nn.Module],
    *,
    kernels: Kernels,
    wrap_stage: Callable[[StageModule], nn.Module] | None = None,
) -> tuple[nn.Module, PipelineStage]:
    """Reduce `model` to this process's stage; return the module for its engine, and the stage.

    `wrap_model` wraps, for the engine, a model that has its head. `wrap_stage`, required if
    `wrap_model` changes parameters' names, wraps a stage without the head, which uses `kernels`.

    Raises:
        ConfigError: the model has fewer blocks than stages.
        ModelError: models of its family can't be split.
    """
    if stages.size == 1:
        return wrap_model(model), PipelineStage()
    blocks = balance_blocks(model, stages.size)
    stage = build_stage(model, number=stages.rank, blocks=blocks)
    if stage.is_last:
        return wrap_model(model), stage
    stage_module = StageModule(model, kernels=kernels)
    return (stage_module if wrap_stage is None else wrap_stage(stage_module)), stage


def make_policy(
    settings: TrainedModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    parallel: ParallelConfig,
    mesh: Mesh,
    *,
    total_steps: int,
    seed: int,
    name: str,
) -> tuple[nn.Module, Passes]:
    """Load a language model to train, or this process's part of it; return it and its passes.

    Raises:
        ConfigError: the model can't be split as the settings require.
        ModelError: the model can't be used, or its family can't be split.
    """
    model = prepare_causal_lm(settings, tokenizer, device=local_device(), seed=seed)
    if settings.fp32_head:
        set_fp32_logits(model)
    passes = make_passes(
        model,
        settings,
        parallel,
        mesh,
        lambda module: Policy(module, kernels=settings.kernels),
        total_steps=total_steps,
        name=name,
    )
    return model, passes


def make_passes(
    model: nn.Module,
    settings: TrainedModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    wrap_model: Callable[[nn.Module], nn.Module],
    *,
    total_steps: int,
    name: str,
    wrap_stage: Callable[[StageModule], nn.Module] | None = None,
) -> Passes:
    """Create an engine for a model to train, or this process's part of it, and its passes.

    See `make_stage_module` for `wrap_model` and `wrap_stage`.

    Raises:
        ConfigError, ModelError: as in `make_stage_module` and `shard_layers`.
    """
    stages = mesh.stages
    shard_layers(model, mesh.tensor, sequence=parallel.sequence)
    module, stage = make_stage_module(
        model, stages, wrap_model, kernels=settings.kernels, wrap_stage=wrap_stage
    )
    engine = Engine(
        module,
        settings,
        total_steps=total_steps,
        name=name,
        group=mesh.data,
        model_parallel=mesh.model_parallel,
        tensor=mesh.tensor,
        stages=stages,
    )
    return Passes(engine) if stages.size == 1 else StagedPasses(engine, stage, stages)


def make_frozen_passes(
    model: PreTrainedModel,
    like: TrainedModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    wrap_model: Callable[[nn.Module], nn.Module],
    *,
    name: str,
) -> tuple[FrozenEngine, ForwardPasses]:
    """Create an engine for a frozen model, with the settings of a trained one, and its passes.

    The model is sharded like the trained models or, if that is not possible (for an encoder, for
    example), replicated on each process. `wrap_model` is the same as in `make_stage_module`.
    """
    stages = mesh.stages
    shard_if_possible(model, mesh.tensor, sequence=parallel.sequence)
    if stages.size == 1:
        if like.zero_stage < 3:  # at stage 3 the engine moves its shards
            _move_to_device(model)
        return FrozenEngine(wrap_model(model), like, name=name), ForwardPasses()
    try:
        module, stage = make_stage_module(model, stages, wrap_model, kernels=like.kernels)
    except (ConfigError, ModelError) as error:
        logger.info("each process has a full copy of the %s: %s", name, error)
        module, stage = wrap_model(model), PipelineStage()
    _move_to_device(model)
    engine = FrozenEngine(module, like, name=name)
    if stage.count == 1:
        return engine, ForwardPasses()
    return engine, StagedForwardPasses(engine, stage, stages)


def _move_to_device(model: nn.Module) -> None:
    """Move a model that was loaded with `defer` to the device."""
    nn.Module.to(model, local_device())
    align_weights(model)


class StagedScorer(Scorer):
    """A scorer that runs a batch through all pipeline stages, whose processes must all call it."""

    def __init__(self, passes: StagedPasses, model: nn.Module) -> None:
        super().__init__(model)
        self._passes = passes
        self._part = passes.engine.model

    def _logits(self, classifier: PreTrainedModel, batch: TokenBatch) -> Tensor:
        num_labels = int(classifier.config.num_labels or 1)
        out = torch.empty(batch.num_tokens, num_labels, device=batch.input_ids.device)
        return self._passes.run_on_all_stages(batch, lambda: self._label_scores(batch), out)

    def _label_scores(self, batch: TokenBatch) -> Tensor:
        assert isinstance(self._part, Scorer)
        return self._part(batch, labels=True)


def get_scorer(passes: Passes, model: nn.Module) -> Scorer:
    """Return a scorer for evaluations: the trained module, or one that runs all its stages."""
    if isinstance(passes, StagedPasses):
        return StagedScorer(passes, model)
    assert isinstance(passes.engine.model, Scorer)
    return passes.engine.model
