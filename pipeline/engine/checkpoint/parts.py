"""The parts of a run that checkpoints store, in addition to its engines."""

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from pipeline.engine.engine import Engine


@runtime_checkable
class Stateful(Protocol):
    """An object with a small state that is the same on every process."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a JSON-serializable object."""
        ...

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401
        """Restore a state that `state_dict` returned."""
        ...


@runtime_checkable
class HasWeights(Protocol):
    """An object whose `weights`, which may be empty, are laid out like its engine's masters."""

    engine: Engine
    weights: list[Tensor]


@runtime_checkable
class HealthMonitor(Stateful, Protocol):
    """Reports the health of a run, for rollbacks."""

    @property
    def is_healthy(self) -> bool:
        """True if the current state is a valid rollback target."""
        ...

    @property
    def window(self) -> int | None:
        """Minimum number of steps undone by a rollback; None if there are no rollbacks."""
        ...


class BestWeights:
    """A copy, in host memory, of this process's masters at the best evaluation so far.

    Without `keep`, values are compared but no copies are made.
    """

    def __init__(self, engine: Engine, *, keep: bool = True) -> None:
        self.engine = engine
        self.keep = keep
        self.value = self.last = float("inf")
        self.step = self.last_step = 0
        self.worse_in_a_row = 0
        self.weights: list[Tensor] = []
        """Copies of the masters at the best evaluation; empty before it, or without `keep`."""

    @property
    def exported_step(self) -> int:
        """Step of the weights to export: the best one, or without `keep` the last one evaluated."""
        return self.step if self.keep else self.last_step

    def update(self, value: float, *, step: int, may_be_best: bool = True) -> None:
        """Keep the current weights if `value` is lower than the best so far.

        Non-finite values and values without `may_be_best` are never the best.
        """
        self.last, self.last_step = value, step
        if may_be_best and math.isfinite(value) and value < self.value:
            self.value, self.step, self.worse_in_a_row = value, step, 0
            if self.keep and self.weights:  # in place, to avoid a second copy
                for weights, master in zip(self.weights, self.engine.masters(), strict=True):
                    weights.copy_(master)
            elif self.keep:
                self.weights = [master.to("cpu", copy=True) for master in self.engine.masters()]
        else:
            self.worse_in_a_row += 1

    def restore(self) -> bool:
        """Load the best weights into the model; return False if there are none."""
        if self.weights:
            self.engine.load_masters(self.weights)
        return bool(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without `weights`; for JSON, numbers that are not finite are None."""
        names = ("step", "last_step", "worse_in_a_row", "value", "last")
        state = {name: getattr(self, name) for name in names}
        return {name: value if math.isfinite(value) else None for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        for name, value in state.items():
            setattr(self, name, float("inf") if value is None else value)
