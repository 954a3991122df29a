"""Models without training: no masters, no gradients, no optimizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipeline.config import TrainedModelConfig
from pipeline.engine.buffers import BufferPool
from pipeline.engine.collectives import make_collectives
from pipeline.engine.setup import build_units, placement_of
from pipeline.engine.zero import ZeroModel
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh


class FrozenEngine:
    """Runs a frozen model, sharded and offloaded like the trained model `like`.

    At stage 3 a process keeps its shard of the weights, and gathers a block for its computation;
    below, the model is unchanged. `name` labels the collectives.
    """

    def __init__(
        self, model: nn.Module, like: TrainedModelConfig, *, name: str = "frozen engine"
    ) -> None:
        self.model = model.requires_grad_(False)
        self._zero: ZeroModel | None = None
        if like.zero_stage == 3:
            device = local_device()
            comm = make_collectives(device, like.zero, current_mesh().data, name=name)
            placement = placement_of(like, device)
            units = build_units(model, like, comm, BufferPool(comm, device), placement)
            self._zero = ZeroModel(model, units, comm, prefetch_units=like.zero.prefetch_units)

    @property
    def updates(self) -> int:
        """Number of changes of the weights: 0."""
        return 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run the model's forward pass."""
        return self.model(*args, **kwargs)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All weights whole on every process."""
        if self._zero is None:
            yield
            return
        with self._zero.gathered():
            yield
