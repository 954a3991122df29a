"""Exponential moving average of the actor's weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pipeline.engine.engine import Engine


class Ema:
    """Averages the fp32 masters: shadow = decay * shadow + (1 - decay) * master.

    Every process averages its own shard of them.
    """

    def __init__(self, engine: Engine, *, decay: float) -> None:
        self.engine = engine
        self.decay = decay
        self.weights = [master.clone() for master in engine.masters()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average toward the current weights."""
        for average, master in zip(self.weights, self.engine.masters(), strict=True):
            average.lerp_(master, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights; its own are restored at the end, bit for bit."""
        own = [master.clone() for master in self.engine.masters()]
        try:
            self.engine.load_masters(self.weights)
            yield
        finally:
            self.engine.load_masters(own)
