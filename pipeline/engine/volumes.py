"""The bytes that an optimizer step moves between processes, by the engine's own layout.

Counted as `CommLog` does, as the size of the whole vector. What one process sends, and receives, is
the share (W - 1) / W of it (Patarasuk and Yuan 2009, the least that any algorithm can do).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.config import TrainedModelConfig
from pipeline.engine.predict import (
    Vector,
    gradient_bytes,
    padded_piece,
    through_a_group,
    unit_vectors,
)


@dataclass(frozen=True)
class Volumes:
    """Bytes of the vectors that collectives go through in one optimizer step."""

    reduce_scatter: int
    """Gradients, once for each micro-batch."""

    all_gather: int
    """Weights, or at stage 0 the sum of the gradients."""

    over_copies: int = 0
    """Pieces of gradients that copies of the model reduce, and gather again."""

    @property
    def total(self) -> int:
        """Bytes of both, within a copy of the model."""
        return self.reduce_scatter + self.all_gather

    def sent(self, world: int) -> int:
        """Bytes that each of a copy's `world` processes sends within it, and as it receives."""
        return self.total * (world - 1) // world

    def sent_over(self, replicas: int) -> int:
        """Bytes that each process sends to those of the other copies, and receives from them."""
        return self.over_copies * (replicas - 1) // replicas


def step_volumes(
    model: nn.Module,
    config: TrainedModelConfig,
    *,
    world: int,
    replicas: int = 1,
    device: torch.device,
    micro_batches: int = 1,
) -> Volumes:
    """What an optimizer step moves, with `micro_batches` on each process.

    Args:
        model: with its adapters, frozen where it is to be; it may be on the meta device.
        config: its settings.
        world: processes that share it; one moves nothing, but its log counts alike.
        replicas: copies of it, each shared by that many processes.
        device: where it computes.
        micro_batches: of one process in an optimizer step.

    Returns:
        Gradients are reduced for each micro-batch, through a process group in fp32 or as
        `zero.reduce_dtype` says, through the memory of one machine in the weights' own type. Stage
        0 then gathers the summed gradients in fp32, stages 1 and 2 the updated weights; stage 3
        gathers weights for each micro-batch, those of each block twice and the others once, frozen
        ones too. Copies sum a process's pieces of the gradients, in fp32, for each micro-batch.
    """
    units = unit_vectors(model, config, world=world)
    narrow = world > 1 and not through_a_group(config, device, world)
    trained = [vector for unit in units for vector in unit if vector.settings.trained]
    reduced = sum(gradient_bytes(vector, narrow=narrow) for vector in trained)
    if through_a_group(config, device, world) and config.zero.reduce_dtype == "bf16":
        reduced = 2 * sum(vector.numel for vector in trained)
    match config.zero_stage:
        case 0:
            gathered = 4 * sum(vector.numel for vector in trained)
        case 3:
            vectors = [vector for unit in units for vector in unit]
            again = [vector for vector in vectors if vector.kind == "block"]
            gathered = micro_batches * (_bytes(vectors) + _bytes(again))
        case _:
            gathered = _bytes(trained)
    pieces = sum(padded_piece(vector, world, replicas) for vector in trained)
    over_copies = micro_batches * 2 * 4 * pieces if replicas > 1 else 0
    return Volumes(micro_batches * reduced, gathered, over_copies)


def pass_volume(model: nn.Module, config: TrainedModelConfig, *, world: int) -> int:
    """Bytes that a pass without gradients gathers: at stage 3 all weights, below it nothing."""
    if config.zero_stage < 3:
        return 0
    return sum(_bytes(unit) for unit in unit_vectors(model, config, world=world))


def _bytes(vectors: Sequence[Vector]) -> int:
    return sum(vector.num_bytes for vector in vectors)
