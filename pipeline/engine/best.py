"""The best weights so far, by an evaluation."""

from torch import Tensor

from pipeline.engine.engine import Engine


class BestWeights:
    """A copy, in host memory, of this process's masters at the best evaluation so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.value = self.last = float("inf")
        self.step = 0
        self.worse_in_a_row = 0
        self._copy: list[Tensor] = []

    def update(self, value: float, *, step: int) -> None:
        """Keep the present weights if `value`, the lower the better, beats the best so far."""
        self.last = value
        if value < self.value:
            self.value, self.step, self.worse_in_a_row = value, step, 0
            self._copy = [master.to("cpu", copy=True) for master in self.engine.masters()]
        else:
            self.worse_in_a_row += 1

    def restore(self) -> None:
        """Put the best weights back into the model."""
        if self._copy:
            self.engine.load_masters(self._copy)
