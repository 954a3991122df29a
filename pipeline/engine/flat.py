"""Trained parameters of one kind, laid out as one flat vector."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ParamSettings:
    """What parameters must share to lie in one vector."""

    dtype: torch.dtype
    lr: float
    weight_decay: float


class FlatGroup:
    """fp32 master weights and fp32 gradients of parameters that share their optimizer settings.

    The model's parameters are views: of `master` where they are fp32, else of a low-precision copy
    that `publish` refreshes. Their `.grad` are views of `grad`, so that autograd accumulates in
    fp32, over any number of backward passes, straight into the vector that is reduced.
    """

    def __init__(self, params: Sequence[nn.Parameter], settings: ParamSettings) -> None:
        self.settings = settings
        self.params = list(params)
        flat = torch.cat([param.detach().flatten() for param in self.params])
        self.copy = flat
        self.master = nn.Parameter(flat if flat.dtype == torch.float32 else flat.float())
        self.grad = torch.zeros_like(self.master)
        self.master.grad = self.grad
        offset = 0
        for param in self.params:
            piece = slice(offset, offset + param.numel())
            offset += param.numel()
            param.data = self.copy[piece].view(param.shape)
            if param.dtype != torch.float32:
                param.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
            param.grad = self.grad[piece].view(param.shape)

    def publish(self) -> None:
        """Round the master weights into the model's low-precision parameters."""
        if self.copy.dtype != torch.float32:
            self.copy.copy_(self.master.detach())

    def squared_norm(self) -> Tensor:
        """Sum of squared gradients, in float64: a scalar tensor."""
        return torch.linalg.vector_norm(self.grad, dtype=torch.float64).square()


def flat_groups(
    model: nn.Module, *, lr: float, lora_lr: float, weight_decay: float
) -> list[FlatGroup]:
    """Group the trained parameters of `model`; frozen ones stay as they are.

    Weight decay spares one-dimensional parameters: biases and norms. Tied parameters count once.
    """
    kinds: dict[ParamSettings, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        settings = ParamSettings(
            dtype=param.dtype,
            lr=lora_lr if ".lora_" in name else lr,
            weight_decay=weight_decay if param.ndim > 1 else 0.0,
        )
        kinds.setdefault(settings, []).append(param)
    return [FlatGroup(params, settings) for settings, params in kinds.items()]
