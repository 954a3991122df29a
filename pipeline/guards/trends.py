"""The course of a few noisy means: the slope of their line, and how far it is from chance."""

import math
from collections.abc import Sequence


def slope_in_errors(values: Sequence[float], errors: Sequence[float]) -> float:
    """The slope of the least-squares line through equally spaced means, in its standard errors.

    With t the centred places: slope = sum(t y) / sum(t^2), of variance sum(t^2 e^2) / sum(t^2)^2,
    where e are the standard errors of the means. Infinite where there is a slope and no error.
    """
    places = _centred(len(values))
    rise = math.fsum(t * y for t, y in zip(places, values, strict=True))
    error = math.sqrt(math.fsum((t * e) ** 2 for t, e in zip(places, errors, strict=True)))
    if error == 0:
        return 0.0 if rise == 0 else math.copysign(math.inf, rise)
    return rise / error


def change(values: Sequence[float]) -> float:
    """From the first to the last place of the least-squares line through equally spaced values."""
    places = _centred(len(values))
    slope = math.fsum(t * y for t, y in zip(places, values, strict=True))
    return slope / math.fsum(t * t for t in places) * (len(values) - 1)


def _centred(count: int) -> list[float]:
    return [place - (count - 1) / 2 for place in range(count)]
