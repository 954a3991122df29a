"""What the passes of a step's models take: training, scoring, reading prompts."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    blocks = _equal_blocks(plain)
    count = 0 if blocks is None else len(blocks)
    few = 2 * every + count % every
    if blocks is None or count <= few + every:
        return _measured(model, how)
    with _shortened(plain, blocks, few):
        one = _measured(model, how)
    with _shortened(plain, blocks, few + every):
        other = _measured(model, how)
    return one.plus((count - few) // every, other)


def _measured(model: nn.Module, how: Pass) -> PassBytes:
    batch = how.rows.batch()
    first, last = _ends(model)
    return measure_pass(
        model,
        lambda: _run(model, batch, how),
        first=first,
        last=last,
        trains=how.does == "train",
        narrow=how.narrow,
        on_cpu=not how.gpu,
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
        if isinstance(each, nn.ModuleList) and len({_looks(block) for block in each}) == 1
    ]
    return max(found, key=len, default=None)


def _looks(block: nn.Module) -> tuple[object, ...]:
    shapes = tuple(
        (name, each.shape, each.requires_grad) for name, each in block.named_parameters()
    )
    return type(block), shapes


@contextmanager
def _shortened(model: nn.Module, blocks: nn.ModuleList, count: int) -> Iterator[None]:
    """The model with its first blocks alone."""
    owner, name = next(
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if child is blocks
    )
    setattr(owner, name, blocks[:count])
    try:
        yield
    finally:
        setattr(owner, name, blocks)


def _run(model: nn.Module, batch: TokenBatch, how: Pass) -> Tensor:
    if how.does == "read":
        backbone = cast("nn.Module", base_model(model).base_model)
        ragged = Ragged(batch.lengths, META)
        if is_ragged(model):
            return backbone(**ragged_inputs(batch, ragged))[0]
        return run_padded(batch, ragged, lambda inputs: backbone(**inputs)[0])
    if how.scores:
        return Scorer(model)(batch).sum()
    policy = Policy(model, kernels=how.kernels, tile=TILE["cuda"] if how.gpu else None)
    outputs = policy(batch, temperature=how.temperature, entropy=how.entropy, uniform=how.uniform)
    loss = outputs.logprobs.sum()
    return loss if outputs.entropy is None else loss + outputs.entropy.sum()
