"""The best weights so far, by an evaluation."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeline.engine.engine import Engine


class BestWeights:
    """A copy, in host memory, of this process's masters at the best evaluation so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.value = self.last = float("inf")
        self.step = 0
        self.worse_in_a_row = 0
        self.weights: list[Tensor] = []
        """As `engine.masters()`; empty before the first evaluation."""

    def update(self, value: float, *, step: int) -> None:
        """Keep the present weights if `value`, the lower the better, beats the best so far."""
        self.last = value
        if value < self.value:
            self.value, self.step, self.worse_in_a_row = value, step, 0
            self.weights = [master.to("cpu", copy=True) for master in self.engine.masters()]
        else:
            self.worse_in_a_row += 1

    def restore(self) -> None:
        """Put the best weights back into the model."""
        if self.weights:
            self.engine.load_masters(self.weights)

    def state_dict(self) -> dict[str, Any]:
        """What a new start goes on with, besides `weights`."""
        return {
            "value": self.value if self.weights else None,
            "last": self.last if self.weights else None,
            "step": self.step,
            "worse_in_a_row": self.worse_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where another stood."""
        for name, value in state.items():
            setattr(self, name, float("inf") if value is None else value)
