"""Time of the phases of a step."""

import time


class Clock:
    """Seconds of each phase since the clock was made."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """By phase."""

    def end(self, phase: str) -> None:
        """A phase has ended, which began when the one before did."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """`seconds_<phase>` of each."""
        return {f"seconds_{phase}": seconds for phase, seconds in self.seconds.items()}
