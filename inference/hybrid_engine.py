"""The hybrid engine: a model is trained in shards and generates from a replica of its weights."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from inference.replica import Replica
from pipeline.engine.engine import KINDS, Engine
from pipeline.parallel.group import Group


class HybridEngine:
    """Switches a model between training and generation; the latter never modifies the weights.

    This follows Yao et al. 2023 (DeepSpeed-Chat), section 4, with copies instead of aliases.

    Args:
        engine: the engine that trains the model.
        model: the Hugging Face model, with its adapters if it has any.
        tp_group: the tensor-parallel group of generation; by default, that of training.
        resident: whether to keep the replica's memory between generations.
        offloading: engines whose states are moved to host memory during generation.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        *,
        tp_group: Group | None = None,
        resident: bool = False,
        offloading: Collection[Engine] = (),
    ) -> None:
        self.engine, self.resident, self.offloading = engine, resident, offloading
        self._model = model
        self._tp_group = engine.tensor.untracked if tp_group is None else tp_group
        self.weights_hash = 0
        """Hash of the weights last used in generation (`inference/replica.py`)."""
        self.seconds = 0.0
        """Seconds spent switching from training to generation, until a caller resets it."""
        self._updates = -1

    @cached_property
    def replica(self) -> Replica:
        """The model that generates, created when it is first used."""
        return Replica(
            self._model,
            shares=not self.engine.sharded,
            tp_group=self._tp_group,
            trained_by=self.engine.tensor,
            stages=self.engine.stages,
        )

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Provide the model with its current weights for generation; all processes enter together.

        Inside the context, a process communicates only with its `tp_group`.
        """
        start, was_loaded = time.perf_counter(), self.replica.loaded
        if self._updates != self.engine.updates or not was_loaded:
            self.replica.load(self.engine)
            self.weights_hash = self.replica.weights_hash()
            self._updates = self.engine.updates
        self.seconds += time.perf_counter() - start
        try:
            with self._offloaded():
                yield self.replica.model
        finally:
            if not (self.resident or was_loaded):
                self.replica.release()

    def metrics(self) -> dict[str, int | float]:
        """Return the hash of the weights last used for generation, and the sync time in seconds."""
        return {"weights_hash": self.weights_hash, "seconds_weight_sync": self.seconds}

    @contextmanager
    def _offloaded(self) -> Iterator[None]:
        """Offload the states of the engines, except weights that the replica reads."""
        try:
            for engine in self.offloading:
                is_read = engine is self.engine and self.replica.shares
                engine.offload_states([kind for kind in KINDS if kind != "weights" or not is_read])
            yield
        finally:
            for engine in self.offloading:
                engine.reload_states()
