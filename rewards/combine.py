"""Several rewards of a response as one: pure functions over the values of all responses."""

import math
from collections.abc import Iterator, Sequence

from rewards.contract import Scored

Values = Sequence[float | None]


def weighted_sum(values: Sequence[Values], weights: Sequence[float]) -> list[float | None]:
    """For each response sum_k w_k r_k over the sources that apply to it.

    Where some say None the weights of the others are scaled so that the absolute weights add up to
    what they do over all sources: a row that a source does not apply to is neither better nor worse
    off. None where no source with a weight applies.

    Args:
        values: by source, a number or None for each response.
        weights: by source.
    """
    whole = math.fsum(abs(weight) for weight in weights)
    combined: list[float | None] = []
    for row in zip(*values, strict=True):
        present = [(w, r) for w, r in zip(weights, row, strict=True) if r is not None and w != 0]
        part = math.fsum(abs(weight) for weight, _ in present)
        scale = 1.0 if part == whole else whole / part if part else 0.0
        total = math.fsum(weight * value for weight, value in present)
        combined.append(scale * total if present else None)
    return combined


def normalize_then_sum(
    values: Sequence[Values], weights: Sequence[float], *, group_size: int, eps: float = 1e-4
) -> list[float | None]:
    """Advantages of GDPO (Liu et al. 2026, arXiv:2601.05242).

    Each source is normalized within its group by itself, A_k = (r_k - mean) / (std + eps), so that
    none drowns in another's scale; then A = sum_k w_k A_k is normalized over the batch. Responses
    that a source does not apply to take no part in its means. A group whose values of a source are
    all equal gets 0 from it, exactly. Deviations are of the sample, n - 1.

    Args:
        values: by source, a number or None for each response; members of a group are adjacent.
        weights: by source.
        group_size: responses to each prompt.
        eps: added to the deviations.
    """
    normalized = [
        [advantage for group in _groups(each, group_size) for advantage in standardized(group, eps)]
        for each in values
    ]
    return standardized(weighted_sum(normalized, weights), eps)


def standardized(values: Values, eps: float) -> list[float | None]:
    """(v - mean) / (std + eps) of the values that are no None; 0 where they are all equal."""
    present = [value for value in values if value is not None]
    if not present or max(present) == min(present):
        return [None if value is None else 0.0 for value in values]
    mean = math.fsum(present) / len(present)
    variance = math.fsum((value - mean) ** 2 for value in present) / (len(present) - 1)
    scale = math.sqrt(variance) + eps
    return [None if value is None else (value - mean) / scale for value in values]


def without_failures(sources: Sequence[Scored], weights: Sequence[float]) -> list[Values]:
    """The values of each source, None on responses that a source with a weight failed on.

    A part of a sum is not a reward: such a response has none, from any source.
    """
    counted = [each.failed for each, weight in zip(sources, weights, strict=True) if weight != 0]

    def has_failed(row: int) -> bool:
        return any(failed[row] is not None for failed in counted)

    return [
        [None if has_failed(row) else value for row, value in enumerate(each.values)]
        for each in sources
    ]


def _groups(values: Values, group_size: int) -> Iterator[Values]:
    for first in range(0, len(values), group_size):
        yield values[first : first + group_size]
