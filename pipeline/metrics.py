"""Scalars of a step, gathered on the device and read once."""

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor


class Averages:
    """Means and maxima of scalar tensors over the micro-batches or minibatches of one step.

    Nothing waits for the device until `values`, which reads it once.
    """

    def __init__(self) -> None:
        self._scalars: list[Tensor] = []
        self._means: dict[str, list[tuple[int, int | float]]] = {}
        self._maxima: dict[str, list[int]] = {}

    def add(self, scalars: Mapping[str, Tensor], weight: int | float = 1) -> None:
        """Record scalars whose mean is wanted.

        `weight` is what they stand for, such as the number of tokens behind a token mean.
        """
        for name, scalar in scalars.items():
            self._means.setdefault(name, []).append((self._keep(scalar), weight))

    def add_maxima(self, scalars: Mapping[str, Tensor]) -> None:
        """Record scalars whose maximum is wanted."""
        for name, scalar in scalars.items():
            self._maxima.setdefault(name, []).append(self._keep(scalar))

    def values(self) -> dict[str, float]:
        """The weighted mean or the maximum of each name; NaN where all weights are 0."""
        if not self._scalars:
            return {}
        read = torch.stack(self._scalars).tolist()
        values = {
            name: _mean([(read[place], weight) for place, weight in seen])
            for name, seen in self._means.items()
        }
        for name, places in self._maxima.items():
            values[name] = _maximum([read[place] for place in places])
        return values

    def _keep(self, scalar: Tensor) -> int:
        self._scalars.append(scalar.detach().float().reshape(()))
        return len(self._scalars) - 1


def _mean(weighted: list[tuple[float, int | float]]) -> float:
    total = sum(weight for _, weight in weighted)
    # A weight of 0 says that nothing stood behind the scalar, which is then often NaN.
    return sum(x * weight for x, weight in weighted if weight) / total if total else float("nan")


def _maximum(values: list[float]) -> float:
    # max() drops a NaN or keeps it depending on its place; a NaN must be seen.
    return float("nan") if any(map(math.isnan, values)) else max(values)


class Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since the clock was made."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
