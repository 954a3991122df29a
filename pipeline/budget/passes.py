"""What the passes of a step's models take: training, scoring, reading prompts."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.budget.activation_profiler import PassBytes, measure_pass
from pipeline.config import Kernels, TrainedModelConfig
from pipeline.data.batches import TokenBatch
from pipeline.engine.units import find_units
from pipeline.kernels.logprobs.dispatch import TILE
from pipeline.models.attention import RAGGED, Ragged
from pipeline.models.forward import (
    Policy,
    Scorer,
    base_model,
    context_length,
    is_ragged,
    ragged_inputs,
    run_padded,
)
from pipeline.models.packing import how_to_run
from pipeline.models.stages import Chunk, Passage, Passed, Stage
from pipeline.models.trained import prepared

META = torch.device("meta")

UnknownPassError = (RuntimeError, NotImplementedError, TypeError, ValueError)
"""What a family raises whose code looks at the numbers themselves."""


@dataclass(frozen=True)
class Rows:
    """A micro-batch: sequences of one length, of which the last tokens are targets."""

    count: int
    length: int
    targets: int
    """Target tokens of each sequence."""

    def batch(self) -> TokenBatch:
        """The rows as the models get them."""
        ids = torch.zeros(self.count * self.length, dtype=torch.int64, device=META)
        targets = ids[: self.count * min(self.targets, self.length - 1)]
        return TokenBatch(ids, (self.length,) * self.count, targets)


@dataclass(frozen=True)
class Pass:
    """How a model is run."""

    rows: Rows
    does: Literal["train", "ask", "read"]
    """`read` ends in hidden states, as prompts do."""

    scores: bool = False
    """Whether the model is a classifier."""

    gpu: bool = False
    kernels: Kernels = "auto"
    uniform: bool = False
    """Whether the loss weighs all targets alike."""

    entropy: bool = False
    temperature: float = 1.0
    checkpoint_every: int | None = None
    """Blocks of which one is recomputed; None keeps all."""

    narrow: bool = False
    """Whether gradients are added up in the weights' own type."""


def longest(model: nn.Module, length: int) -> int:
    """Tokens of a sequence that the model can read."""
    return min(length, context_length(base_model(model)))


@functools.lru_cache(maxsize=256)
def pass_bytes(model: nn.Module, how: Pass) -> PassBytes:
    """Bytes of a pass of a model on the meta device.

    Of blocks that are all alike a few are run, for each adds as much as the one before.

    Raises:
        UnknownPassError: its code can't be run without numbers.
    """
    return _by_a_few(model, how, lambda: _run(model, how))


@functools.lru_cache(maxsize=256)
def chunk_bytes(model: nn.Module, stage: Stage, chunk: Chunk, how: Pass) -> PassBytes:
    """Bytes of a pass through a chunk of a stage, whose model this is; else as `pass_bytes`.

    With what it receives and hands on: hidden states, and in training their gradients.
    """
    received: list[Tensor] = []  # a stage has it until its gradient has been sent

    def receive() -> None:
        if chunk.inlet is not None:
            tokens = how.rows.count * how.rows.length
            hidden = torch.empty(1, tokens, stage.width, dtype=stage.dtype, device=META)
            received[:] = [hidden.requires_grad_(torch.is_grad_enabled())]
            chunk.inlet.received = hidden

    def run() -> Tensor:
        if chunk.is_last:
            return _run(model, how, receive)
        receive()
        return Passage(model, kernels=how.kernels)(how.rows.batch())

    beside = () if stage.borrowed is None else (stage.borrowed,)
    with chunk.at_work():
        return _by_a_few(model, how, run, beside)


def _by_a_few(
    model: nn.Module, how: Pass, run: Callable[[], Tensor], beside: Sequence[Tensor] = ()
) -> PassBytes:
    """Bytes of `run`, by those of a few blocks; `beside` are weights that are no parameters."""
    plain = base_model(model)
    if how_to_run(plain).packed:
        plain.set_attn_implementation(RAGGED)
    every = how.checkpoint_every or 1
    prepared(
        model,
        TrainedModelConfig(
            gradient_checkpointing=how.checkpoint_every is not None, checkpoint_every=every
        ),
    )
    for block in plain.modules():
        if isinstance(block, GradientCheckpointingLayer) and how.checkpoint_every is None:
            block.gradient_checkpointing = False
    model.train(how.does == "train")
    measured = partial(_measured, model, how, run, beside)
    blocks = _equal_blocks(plain)
    count = 0 if blocks is None else len(_present(blocks))
    few = 2 * every + count % every
    if blocks is None or count <= few + every:
        return measured()
    with _shortened(plain, blocks, few):
        one = measured()
    with _shortened(plain, blocks, few + every):
        other = measured()
    return one.plus((count - few) // every, other)


def _measured(
    model: nn.Module, how: Pass, run: Callable[[], Tensor], beside: Sequence[Tensor]
) -> PassBytes:
    first, last = _ends(model)
    return measure_pass(
        model,
        run,
        first=first,
        last=last,
        trains=how.does == "train",
        narrow=how.narrow,
        on_cpu=not how.gpu,
        beside=beside,
    )


def _ends(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The first and the last block; the model itself where it has none."""
    first, *_, last = [*find_units(model)[:-1]] * 2 or [find_units(model)[-1]] * 2
    return first.module, last.module


def _equal_blocks(model: nn.Module) -> nn.ModuleList | None:
    """The model's blocks, where one is like the other and all are in one list."""
    config = base_model(model).config.get_text_config()
    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        return None
    found = [
        each
        for each in model.modules()
        if isinstance(each, nn.ModuleList) and len({_looks(block) for block in _present(each)}) == 1
    ]
    return max(found, key=lambda each: len(_present(each)), default=None)


def _present(blocks: nn.ModuleList) -> list[nn.Module]:
    """The blocks that are not on another stage."""
    return [each for each in blocks if not isinstance(each, Passed)]


def _looks(block: nn.Module) -> tuple[object, ...]:
    shapes = tuple(
        (name, each.shape, each.requires_grad) for name, each in block.named_parameters()
    )
    return type(block), shapes


@contextmanager
def _shortened(model: nn.Module, blocks: nn.ModuleList, count: int) -> Iterator[None]:
    """The model with the first of its blocks alone."""
    owner, name = next(
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is blocks
    )
    left = set(_present(blocks)[count:])
    setattr(owner, name, nn.ModuleList(each for each in blocks if each not in left))
    try:
        yield
    finally:
        setattr(owner, name, blocks)


def _run(model: nn.Module, how: Pass, receive: Callable[[], None] = lambda: None) -> Tensor:
    """What a pass ends in: a loss, or what stands for it.

    `receive` puts hidden states in their place, before the pass itself.
    """
    batch = how.rows.batch()
    if how.does == "read":
        backbone = cast("nn.Module", base_model(model).base_model)
        ragged = Ragged(batch.lengths, META)
        if is_ragged(model):
            return backbone(**ragged_inputs(batch, ragged))[0]
        return run_padded(batch, ragged, lambda inputs: backbone(**inputs)[0])
    if how.scores:
        receive()
        return Scorer(model)(batch).sum()
    policy = Policy(model, kernels=how.kernels, tile=TILE["cuda"] if how.gpu else None)
    policy.settle(batch)
    receive()
    outputs = policy(batch, temperature=how.temperature, entropy=how.entropy, uniform=how.uniform)
    loss = outputs.logprobs.sum()
    return loss if outputs.entropy is None else loss + outputs.entropy.sum()
