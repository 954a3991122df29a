"""What a run is made of beside its engines, as far as its checkpoints know."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from pipeline.engine.engine import Engine


@runtime_checkable
class Stateful(Protocol):
    """Something whose state is a few numbers, the same on every process."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON has it."""
        ...

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401
        """Take it up."""
        ...


@runtime_checkable
class KeepsWeights(Protocol):
    """Something that keeps vectors laid out as an engine's masters, or an empty list."""

    engine: Engine
    weights: list[Tensor]


@runtime_checkable
class KnowsHealth(Stateful, Protocol):
    """What knows whether a run is healthy, so that it can go back to where it was."""

    @property
    def is_healthy(self) -> bool:
        """Whether the state as it is now may be gone back to."""
        ...

    @property
    def window(self) -> int | None:
        """The fewest steps by which the run goes back; None where it never does."""
        ...
