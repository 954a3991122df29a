"""fp32 masters of the weights that learn: where they lie, and how they become weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Int16
from torch import Tensor, nn

from pipeline.config import Kernels, OptimConfig
from pipeline.engine.flat import FlatParams, Placement
from pipeline.engine.optim import steps_in_one_pass
from pipeline.kernels.adamw.definition import COPIES, join_master, round_weights, split_master

Kind = Literal["weights", "split", "whole"]

BYTES: Mapping[Kind, int] = {"weights": 0, "split": 2, "whole": 4}
"""Bytes that a master of each kind takes beside its weight."""

PIECE = 2**20
"""Elements that PyTorch rounds at once: what it makes on the way stays small."""


def kind_of_masters(
    dtype: torch.dtype, placement: Placement, optim: OptimConfig, kernels: Kernels
) -> Kind:
    """How the masters of weights in `dtype` are kept.

    Returns:
        weights: they are the weights, in fp32 where the optimizer works; split: bf16 weights there
        and 16 bits beside them are the masters, for an optimizer that steps them so; whole: an fp32
        vector of their own.
    """
    where = placement.param_device if placement.shard_params else placement.device
    on_disk = placement.params_on_disk or placement.optimizer_on_disk
    if on_disk or where != placement.optimizer_device:
        return "whole"
    if dtype == torch.float32:
        return "weights"
    splits = kernels != "off" and steps_in_one_pass(optim, placement.optimizer_device)
    return "split" if splits and dtype == torch.bfloat16 else "whole"


class Masters:
    """The masters of a flat vector of weights, of the own piece or of all at stage 0."""

    def __init__(self, flat: FlatParams, kind: Kind) -> None:
        self.flat, self.kind = flat, kind
        self.low_bits: Int16[Tensor, " n"] | None = None
        placement = flat.placement
        vector = torch.empty(0, dtype=torch.float32, device=placement.optimizer_device)
        if kind == "weights":
            vector = self.weights.data
        elif kind == "split":  # of weights that have just been loaded the low bits are zero
            self.low_bits = torch.zeros_like(self.weights, dtype=torch.int16)
        elif not placement.optimizer_on_disk:
            vector = self.from_weights()
        self.param = nn.Parameter(vector)
        """What an optimizer of PyTorch has its state for: the masters, where they are one vector in
        memory, and otherwise nothing."""

    @property
    def weights(self) -> Tensor:
        """The weights whose masters this process keeps; empty where they are on a disk."""
        return self.flat.shard if self.flat.placement.shard_optimizer else self.flat.full

    @property
    def numel(self) -> int:
        """Elements of the masters, wherever they are."""
        flat = self.flat
        return flat.shard_numel if flat.placement.shard_optimizer else flat.numel

    def fp32(self) -> Float[Tensor, " n"]:
        """The masters as one vector: where they are split, a copy that is made for the caller."""
        if self.low_bits is not None:
            return join_master(self.weights, self.low_bits)
        return self.param.detach()

    def read(self, place: slice) -> Float[Tensor, " k"]:
        """A copy of some of them."""
        if self.low_bits is not None:
            return join_master(self.weights[place], self.low_bits[place])
        return self.param.detach()[place].clone()

    def write(self, place: slice, values: Float[Tensor, " k"], rounded: Tensor | None) -> None:
        """Replace some of them, and what they are rounded to in `rounded`, `room_for_weights`."""
        if self.low_bits is not None:
            weights, low_bits = split_master(values)
            self.weights[place] = weights
            self.low_bits[place] = low_bits
            return
        self.param.detach()[place] = values
        if rounded is not None:
            rounded[place] = round_weights(values, rounded.dtype)

    @contextmanager
    def changing(self) -> Iterator[Float[Tensor, " n"]]:
        """The masters as one vector, to change in place; weights beside them stay as they are."""
        masters = self.fp32()
        yield masters
        if self.low_bits is not None:
            weights, low_bits = split_master(masters)
            self.weights.copy_(weights)
            self.low_bits.copy_(low_bits)

    def beside(self) -> Iterator[Tensor]:
        """The tensors that the masters take beside the weights."""
        if self.low_bits is not None:
            yield self.low_bits
        elif self.kind == "whole":
            yield self.param.detach()

    def from_weights(self) -> Float[Tensor, " n"]:
        """The weights in fp32, where the optimizer works; read from the disk if they are there."""
        disk, placement = self.flat.disk, self.flat.placement
        own = self.weights if disk is None else disk.read()
        copy = placement.host_empty(own.numel(), torch.float32, placement.optimizer_device)
        copy.copy_(own)
        if disk is not None:
            disk.give_back()
        return copy

    def room_for_weights(self) -> Tensor | None:
        """Where a kernel is to round them: into the weights, or, where those are elsewhere, beside.

        None where it has nothing to round.
        """
        flat = self.flat
        if self.kind != "whole" or flat.settings.dtype not in COPIES:
            return None
        device = flat.placement.optimizer_device
        if flat.disk is None and self.weights.device == device:
            return self.weights
        return flat.placement.host_empty(self.numel, flat.settings.dtype, device)

    def write_weights(self, rounded: Tensor | None = None) -> None:
        """Have the weights follow; `rounded` is `room_for_weights` that a kernel has filled."""
        flat, own = self.flat, self.weights
        if self.kind != "whole" or rounded is own:
            return
        if flat.disk is not None:
            dtype = flat.settings.dtype
            flat.disk.write(round_weights(self.fp32(), dtype) if rounded is None else rounded)
        elif rounded is not None:
            own.copy_(rounded)
        else:
            for weights, masters in zip(own.split(PIECE), self.fp32().split(PIECE), strict=True):
                weights.copy_(round_weights(masters, own.dtype))
