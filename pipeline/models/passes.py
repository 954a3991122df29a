"""The passes of a step over its micro-batches, on one process or through the stages of a pipeline.

A step says what its loss is, and goes on as if the model were whole: losses come back on every
stage.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.config import Kernels, ParallelConfig, TrainedModelConfig
from pipeline.engine.engine import Engine
from pipeline.engine.frozen import FrozenEngine
from pipeline.errors import ConfigError, ModelError
from pipeline.models.deferred import read_stored
from pipeline.models.forward import Policy
from pipeline.models.forward_passes import B, ForwardPasses, Found, StagedForwardPasses
from pipeline.models.stages import Passage, Stage, blocks_of, cut_stage
from pipeline.models.tensor_cut import cut_layers, cut_where_possible
from pipeline.models.trained import trained_causal_lm
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.places import Places, most_sent
from pipeline.parallel.schedules import Instruction, Schedule, orders_of

logger = logging.getLogger(__name__)


class Passes(ForwardPasses):
    """The passes of a model that this process has whole, and that learns."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def metrics(self) -> dict[str, float]:
        """What a step's line in metrics.jsonl says of its passes; all processes call it."""
        return {}

    def learn(self, batches: Iterable[B], loss_of: Found[B], *, divisor: float) -> list[Tensor]:
        """Add the gradients of all losses, each divided; the losses, for `total`."""
        losses: list[Tensor] = []
        for batch in batches:
            loss = loss_of(batch)
            self.engine.backward(loss / divisor)
            losses.append(loss.detach())
        return losses


class StagedPasses(StagedForwardPasses, Passes):
    """The passes of a stage of a pipeline that learns, in step with those of the others.

    The last stage sends the gradient that each micro-batch finds for its copy of a shared weight to
    the first, where autograd adds it to the embedding's, as it does in one process.
    """

    def __init__(
        self,
        engine: Engine,
        stage: Stage,
        stages: Group,
        schedule: Schedule,
        passage: nn.Module | None = None,
    ) -> None:
        Passes.__init__(self, engine)
        StagedForwardPasses.__init__(self, engine, stage, stages, passage)
        self._schedule: Schedule = schedule
        self._took = 0.0
        """Seconds of the passes of the last optimizer step."""

    def learn(self, batches: Iterable[B], loss_of: Found[B], *, divisor: float) -> list[Tensor]:
        """Add all gradients in the order of the schedule; only the last stage has losses."""
        began, self._transfers.waited = time.perf_counter(), 0.0
        self._follow()
        batches = list(batches)
        chunks = len(self._stage.chunks)
        orders = orders_of(
            self._schedule, stages=self._stage.count, count=len(batches), chunks=chunks
        )
        self._places = Places(orders, chunks=chunks)
        most = most_sent(self._schedule, self._stage.count)
        losses: list[Tensor] = []
        for each in orders[self._stage.number]:
            if each.kind == "forward":
                batch = batches[each.micro_batch]
                losses += self._forward(each, batch.tokens, lambda batch=batch: loss_of(batch))
            else:
                self._back(each, divisor)
                if most is not None:
                    self._transfers.settle(but=most)
        self._transfers.settle()
        self._places = None
        self._took = time.perf_counter() - began
        return losses

    def metrics(self) -> dict[str, float]:
        """`bubble`: the share of the step's passes in which stages waited for each other."""
        waited, took = self._stages.sums([self._transfers.waited, self._took])
        return {"bubble": waited / max(took, 1e-9)}

    def _back(self, at: Instruction, divisor: float) -> None:
        """Go back through a micro-batch, and hand on the gradient of what was received."""
        stage, number, chunk = self._stage, at.micro_batch, self._stage.chunks[at.chunk]
        waiting = self._waiting.pop((number, at.chunk))
        if chunk.is_last:
            with chunk.at_work():  # of blocks that are run again
                self.engine.backward(waiting.output / divisor)
            self._send_tied(number)
        else:
            roots, gradients = [waiting.output], [torch.empty_like(waiting.output)]
            self._receive(gradients[0], "gradients", number, chunk, from_chunk=chunk.number + 1)
            if waiting.tied is not None and waiting.tied.requires_grad:
                roots.append(waiting.tied)
                gradients.append(torch.empty_like(waiting.tied))
                self._transfers.receive(gradients[1], stage.count - 1, "tied gradients", number)
            if any(root.requires_grad for root in roots):
                with chunk.at_work():
                    self.engine.backward_from(roots, gradients, blocks_alone=not chunk.is_first)
        if waiting.received is not None:
            gradient = waiting.received.grad
            gradient = torch.zeros_like(waiting.received) if gradient is None else gradient
            self._send(gradient, "gradients", number, chunk.number - 1)

    def _send_tied(self, number: int) -> None:
        """Send the first stage what this micro-batch found for the weight it has."""
        borrowed = self._stage.borrowed
        if borrowed is None or not borrowed.requires_grad:
            return
        gradient, borrowed.grad = borrowed.grad, None
        gradient = torch.zeros_like(borrowed) if gradient is None else gradient
        taken_at = self._taken_at("tied gradients", number, 0)
        self._transfers.send(gradient, 0, "tied gradients", number, taken_at=taken_at)


class Own(NamedTuple):
    """What a process runs of a model."""

    part: nn.Module
    """The module that its engine trains: the model, or this stage of it."""

    stage: Stage

    passage: nn.Module | None = None
    """What runs chunks without the head, on a process that has the head too."""


def own_part(
    model: nn.Module,
    parallel: ParallelConfig,
    stages: Group,
    whole: Callable[[nn.Module], nn.Module],
    *,
    kernels: Kernels,
    follows: bool = False,
    passing: Callable[[Passage], nn.Module] | None = None,
) -> Own:
    """This process's stage of a model, which is left without what others have.

    Args:
        model: the Hugging Face model.
        parallel: how it is cut.
        stages: the processes that have the stages.
        whole: makes of a model that ends with its head what the engine runs.
        kernels: of a stage without the head.
        follows: whether the partition is that of another model, to be taken where it fits.
        passing: makes what the engine runs of a stage without the head, where the parameters of
            `whole` have other names than its.

    Raises:
        ConfigError: the model can't be cut as the settings say.
        ModelError: models of its family can't be cut.
    """
    if stages.size == 1:
        return Own(whole(model), Stage())
    blocks = blocks_of(
        model, stages.size, parallel.partition, chunks=parallel.chunks, follows=follows
    )
    stage = cut_stage(model, number=stages.rank, blocks=blocks, stages=stages.size)
    passage = Passage(model, kernels=kernels)
    if stage.is_last:
        return Own(whole(model), stage, passage if parallel.chunks > 1 else None)
    return Own(passage if passing is None else passing(passage), stage)


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
    follows: bool = False,
    passing: Callable[[Passage], nn.Module] | None = None,
) -> Passes:
    """The passes of a model that learns, whole or this process's part of it, in an engine.

    `whole`, `follows` and `passing` are those of `own_part`.

    Raises:
        ConfigError, ModelError: as `own_part` and `cut_layers`.
    """
    stages = mesh.stages
    cut_layers(model, mesh.tensor, sequence=parallel.sequence)
    own = own_part(
        model, parallel, stages, whole, kernels=settings.kernels, follows=follows, passing=passing
    )
    engine = Engine(
        own.part,
        settings,
        total_steps=total_steps,
        name=name,
        group=mesh.data,
        parts=mesh.parts,
        tensor=mesh.tensor,
        stages=stages,
    )
    if stages.size == 1:
        return Passes(engine)
    if own.passage is not None:
        engine.zero.enter_by(own.passage)
    return StagedPasses(engine, own.stage, stages, parallel.schedule, own.passage)


def frozen_passes(
    model: PreTrainedModel,
    like: TrainedModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    whole: Callable[[nn.Module], nn.Module],
    *,
    name: str,
) -> tuple[FrozenEngine, ForwardPasses]:
    """A model that only answers, kept as `like` is, and its passes.

    It is cut as the models that learn are. One that can't be, such as an encoder, is whole on each
    process. `whole` is that of `own_part`.
    """
    stages = mesh.stages
    cut_where_possible(model, mesh.tensor, sequence=parallel.sequence)
    if stages.size == 1:
        if like.zero_stage < 3:  # else its engine reads what it keeps
            read_stored(model, local_device())
        return FrozenEngine(whole(model), like, name=name), ForwardPasses()
    try:
        own = own_part(model, parallel, stages, whole, kernels=like.kernels, follows=True)
    except (ConfigError, ModelError) as error:
        logger.info("each process has the %s whole: %s", name, error)
        own = Own(whole(model), Stage())
    read_stored(model, local_device())
    engine = FrozenEngine(own.part, like, name=name)
    if own.stage.count == 1:
        return engine, ForwardPasses()
    return engine, StagedForwardPasses(engine, own.stage, stages, own.passage)
