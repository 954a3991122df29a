"""Exponential moving average of the actor's weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Ema:
    """Averages the trained weights in fp32: shadow = decay * shadow + (1 - decay) * weight."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.decay = decay
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shadow = {name: p.detach().float().clone() for name, p in self.trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average toward the present weights."""
        for name, param in self.trained.items():
            self.shadow[name].lerp_(param.float(), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights; its own come back at the end, to the bit."""
        own = {name: param.detach().clone() for name, param in self.trained.items()}
        try:
            self._copy(self.shadow)
            yield
        finally:
            self._copy(own)

    @torch.no_grad()
    def _copy(self, weights: dict[str, torch.Tensor]) -> None:
        for name, param in self.trained.items():
            param.copy_(weights[name])
