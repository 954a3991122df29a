"""The parts of a run that checkpoints store, in addition to its engines."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from pipeline.engine.engine import Engine


@runtime_checkable
class Stateful(Protocol):
    """An object with a small state, the same on every process."""

    def state_dict(self) -> dict[str, Any]:
        """The state, JSON-serializable."""
        ...

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401
        """Load it."""
        ...


@runtime_checkable
class KeepsWeights(Protocol):
    """An object with vectors in the layout of an engine's masters, or an empty list."""

    engine: Engine
    weights: list[Tensor]


@runtime_checkable
class KnowsHealth(Stateful, Protocol):
    """Reports the health of a run, for rollbacks."""

    @property
    def is_healthy(self) -> bool:
        """True if the current state is a valid rollback target."""
        ...

    @property
    def window(self) -> int | None:
        """Fewest steps of a rollback; None if there are none."""
        ...
