"""Time of the phases of a step."""

import time


class Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since the clock was made."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
