"""Standard errors and trends of means."""

import math
from collections.abc import Sequence

from jaxtyping import Bool, Float
from torch import Tensor

from pipeline.parallel.mesh import current_mesh


def standard_error(values: Float[Tensor, " B"], *, group_size: int) -> float:
    """Return the standard error of the mean of the known values, over all processes.

    Responses to the same prompt are not independent, so prompts are the clusters (Liang and Zeger
    1986, with the factor G / (G - 1) for G prompts). For n values x_i with mean m, the result is
    sqrt(sum_g (sum_i (x_i - m))^2 G / (G - 1)) / n; with one response per prompt, std / sqrt(n).

    Args:
        values: value of each response; NaN if unknown.
        group_size: number of responses per prompt.
    """
    grouped = values.double().view(-1, group_size)
    known = ~grouped.isnan()
    counts = known.sum(dim=1).double()
    sums = grouped.nan_to_num(nan=0.0).sum(dim=1)
    n, total, prompts = current_mesh().data.sums(
        [counts.sum().item(), sums.sum().item(), float((counts > 0).sum().item())]
    )
    if prompts < 2:
        return 0.0
    mean = total / n
    (squares,) = current_mesh().data.sums([(sums - counts * mean).square().sum().item()])
    return (squares * prompts / (prompts - 1)) ** 0.5 / n


def global_moments(values: Tensor, mask: Bool[Tensor, "*shape"]) -> tuple[float, float]:
    """Return the mean and biased variance of all processes' values where `mask` is true."""
    real = values[mask].double()
    total, count = current_mesh().data.sums([real.sum().item(), real.numel()])
    mean = total / max(1.0, count)
    (squares,) = current_mesh().data.sums([(real - mean).square().sum().item()])
    return mean, squares / max(1.0, count)


def slope_in_errors(values: Sequence[float], errors: Sequence[float]) -> float:
    """Return the slope of the least-squares line through equally spaced means, in standard errors.

    With centered positions t: slope = sum(t y) / sum(t^2), with variance sum(t^2 e^2) / sum(t^2)^2,
    where e are the standard errors. If these are all 0, a nonzero slope becomes infinite.
    """
    positions = _centered_positions(len(values))
    rise = math.fsum(t * y for t, y in zip(positions, values, strict=True))
    error = math.sqrt(math.fsum((t * e) ** 2 for t, e in zip(positions, errors, strict=True)))
    if error == 0:
        return 0.0 if rise == 0 else math.copysign(math.inf, rise)
    return rise / error


def fitted_change(values: Sequence[float]) -> float:
    """Return the total rise of the least-squares line through equally spaced values."""
    positions = _centered_positions(len(values))
    slope = math.fsum(t * y for t, y in zip(positions, values, strict=True))
    return slope / math.fsum(t * t for t in positions) * (len(values) - 1)


def _centered_positions(count: int) -> list[float]:
    return [index - (count - 1) / 2 for index in range(count)]
