"""A reward function with partial credit, of docs/results.md#three-digits."""

from collections.abc import Sequence
from typing import Any


def right_digits(episodes: Sequence[Any]) -> list[float]:
    """The share of correct digits, position by position; 0 if the lengths differ."""
    return [_share(each.response.strip(), str(each.extra["answer"])) for each in episodes]


def _share(given: str, right: str) -> float:
    if len(given) != len(right):
        return 0.0
    return sum(a == b for a, b in zip(given, right, strict=True)) / len(right)
