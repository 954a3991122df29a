"""The hybrid engine: the actor trains in shards, and generates from a replica of its weights.

As in Yao et al. 2023 (DeepSpeed-Chat), section 4, but with copies instead of aliases: generation
never modifies the trained weights.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from inference.replica import Replica
from pipeline.engine.engine import KINDS, Engine, Kind
from pipeline.parallel.group import ALONE, Group


class HybridEngine:
    """Switches the actor between training and generation.

    Args:
        engine: trains the actor.
        model: the actor's Hugging Face model, with its adapters if it has any.
        tp_group: the tensor-parallel group of generation.
        resident: keep the replica's memory between generations.
        offloading: engines whose states are moved to host memory while the actor generates.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        *,
        tp_group: Group = ALONE,
        resident: bool = False,
        offloading: Collection[Engine] = (),
    ) -> None:
        self.engine = engine
        self.resident = resident
        self.offloading = tuple(offloading)
        self.replica = Replica(
            model,
            shares=not engine.sharded,
            tp_group=tp_group,
            trained_by=engine.tensor,
            stages=engine.stages,
        )
        self.weights_hash = 0
        """Hash of the weights last used in generation (`inference/replica.py`)."""
        self.seconds = 0.0
        """Seconds of the last switch from training to generation."""
        self._updates = -1

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Context with the actor's current weights to generate with; all processes must enter.

        Inside, a process communicates with its `tp_group` only.
        """
        begin, was_loaded = time.perf_counter(), self.replica.loaded
        self._load()
        self.seconds = time.perf_counter() - begin
        try:
            with self._offloaded():
                yield self.replica.model
        finally:
            if not (self.resident or was_loaded):
                self.replica.release()

    def metrics(self) -> dict[str, int | float]:
        """The hash of the weights used last in generation, and the seconds of their sync."""
        return {"weights_hash": self.weights_hash, "seconds_weight_sync": self.seconds}

    def _load(self) -> None:
        updates = self.engine.zero.updates
        if updates != self._updates or not self.replica.loaded:
            self.replica.load(self.engine)
            self.weights_hash = self.replica.weights_hash()
            self._updates = updates

    @contextmanager
    def _offloaded(self) -> Iterator[None]:
        try:
            for engine in self.offloading:
                engine.offload_states(self._kinds(engine))
            yield
        finally:
            for engine in self.offloading:
                engine.reload_states()

    def _kinds(self, engine: Engine) -> Collection[Kind]:
        """Kinds of tensors to offload, except weights that the replica reads."""
        shared = engine is self.engine and self.replica.shares
        return tuple(kind for kind in KINDS if kind != "weights") if shared else KINDS
