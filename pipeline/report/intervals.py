"""How far a figure of that many prompts can be trusted: 95 % intervals of shares and of changes."""

import math
from collections.abc import Sequence
from typing import Literal

Verdict = Literal["better", "worse", "not told apart"]

Z = 1.959964
"""Of a standard normal, 95 % lie between -Z and Z."""

Interval = tuple[float, float]


def share_interval(successes: int | float, count: int) -> Interval:
    """95 % interval of the share that `successes` of `count` trials estimate (Wilson 1927)."""
    share = successes / count
    center = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (center - half) / scale), min(1.0, (center + half) / scale)


def mean_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean of two or more independent values, by the normal distribution."""
    count = len(values)
    center = sum(values) / count
    spread = math.sqrt(sum((value - center) ** 2 for value in values) / (count - 1))
    half = Z * spread / math.sqrt(count)
    return center - half, center + half


def change_interval(gained: float, lost: float, count: int) -> Interval:
    """95 % interval of a share's change between two models that answered the same `count` prompts.

    `gained` prompts are right with the new model alone, `lost` with the old one alone; those on
    which both agree tell nothing about the change. Parts of prompts may be gained and lost, whose
    spread is smaller: the interval then holds more often. Half a prompt is added to each of the
    four kinds of pairs, so that the interval also holds for few prompts (Agresti and Min 2005,
    "Wald + 2").
    """
    total = count + 2
    change = (gained - lost) / total
    spread = math.sqrt((gained + lost + 1) - (gained - lost) ** 2 / total) / total
    return max(-1.0, change - Z * spread), min(1.0, change + Z * spread)


def verdict_of(interval: Interval, *, equal: float = 0.0) -> Verdict:
    """What an interval says of a change: none is `equal`."""
    low, high = interval
    if low > equal:
        return "better"
    return "worse" if high < equal else "not told apart"
