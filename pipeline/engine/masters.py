"""fp32 masters of trained weights, and the optimizer that updates them."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float, Int16
from torch import Tensor, nn

from pipeline.config import OptimConfig
from pipeline.engine.flat import FlatParams, Placement
from pipeline.kernels.adamw import COPIES, join_master, round_weights, split_master

FUSED_DEVICES = ("cpu", "cuda")
"""Devices on which every fused class of torch.optim has its kernel."""


MOMENTS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""In which type AdamW's moments are kept, by the setting `optim.moments`."""


def build_optimizer(groups: Sequence[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that `optim` names, in its fused implementation where it has one.

    Args:
        groups: one or more of {"params": [flat fp32 parameter], "lr": ..., "weight_decay": ...}.
        optim: the class, its betas, eps and further arguments; an implementation that these ask for
            (fused, foreach) comes before the choice made here.
    """
    optimizer_class = getattr(torch.optim, optim.name)
    accepted = inspect.signature(optimizer_class).parameters
    arguments: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps}
    devices = {param.device.type for group in groups for param in group["params"]}
    if devices <= set(FUSED_DEVICES) and "foreach" not in optim.params:
        arguments["fused"] = True
    arguments = {name: value for name, value in arguments.items() if name in accepted}
    own = [
        {name: value for name, value in group.items() if name == "params" or name in accepted}
        for group in groups
    ]
    return optimizer_class(own, **(arguments | optim.params))


def uses_adamw_kernel(optim: OptimConfig) -> bool:
    """True for AdamW without further arguments, which `pipeline.kernels.adamw` steps.

    Other optimizers are classes of torch.optim, with one weight decay per vector.
    """
    return optim.name == "AdamW" and not optim.params


Kind = Literal["weights", "split", "whole"]

PIECE = 2**20
"""Elements that PyTorch rounds at once, which bounds its temporary memory."""


def kind_of_masters(dtype: torch.dtype, placement: Placement, optim: OptimConfig) -> Kind:
    """Kind of the masters of weights in `dtype`.

    Returns:
        weights: they are the weights, in fp32 on the optimizer's device; split: a master is the
        bf16 weight and 16 more bits, for AdamW; whole: a separate fp32 vector.
    """
    where = placement.param_device if placement.shard_params else placement.device
    on_disk = placement.params_on_disk or placement.optimizer_on_disk
    if on_disk or where != placement.optimizer_device:
        return "whole"
    if dtype == torch.float32:
        return "weights"
    return "split" if uses_adamw_kernel(optim) and dtype == torch.bfloat16 else "whole"


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
        """The parameter of PyTorch's optimizer: the masters, or empty if they are not one vector in
        memory."""

    @property
    def weights(self) -> Tensor:
        """The weights whose masters this process keeps; empty if they are on a disk."""
        return self.flat.shard if self.flat.placement.shard_optimizer else self.flat.full

    @property
    def numel(self) -> int:
        """Elements of the masters, wherever they are."""
        flat = self.flat
        return flat.shard_numel if flat.placement.shard_optimizer else flat.numel

    def fp32(self) -> Float[Tensor, " n"]:
        """The masters as one vector: a copy if they are split."""
        if self.low_bits is not None:
            return join_master(self.weights, self.low_bits)
        return self.param.detach()

    @contextmanager
    def changing(self) -> Iterator[Float[Tensor, " n"]]:
        """The masters as one vector, to change in place; separate weights do not change."""
        masters = self.fp32()
        yield masters
        if self.low_bits is not None:
            weights, low_bits = split_master(masters)
            self.weights.copy_(weights)
            self.low_bits.copy_(low_bits)

    def beside(self) -> Iterator[Tensor]:
        """The tensors of the masters in addition to the weights."""
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
        """Destination of rounded weights: the weights, or a buffer if those are elsewhere.

        None if there is nothing to round.
        """
        flat = self.flat
        if self.kind != "whole" or flat.settings.dtype not in COPIES:
            return None
        device = flat.placement.optimizer_device
        if flat.disk is None and self.weights.device == device:
            return self.weights
        return flat.placement.host_empty(self.numel, flat.settings.dtype, device)

    def write_weights(self, rounded: Tensor | None = None) -> None:
        """Update the weights; `rounded` is the filled result of `room_for_weights`."""
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
