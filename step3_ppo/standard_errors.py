"""How well a mean over a rollout's responses is known.

Dimension name: B responses of this process, those to a prompt neighbours.
"""

from jaxtyping import Float
from torch import Tensor

from pipeline.parallel.mesh import current_mesh


def standard_error(values: Float[Tensor, " B"], *, group_size: int) -> float:
    """Standard error of the mean of the values that are known, over all processes.

    Responses to the same prompt are not independent, so that prompts count (Liang and Zeger 1986,
    with the factor G / (G - 1) for G prompts): sqrt(sum_g (sum_i x_i - m)^2 G / (G - 1)) / n. With
    one response to each it is the standard deviation over sqrt(n).

    Args:
        values: NaN where a response has none.
        group_size: responses to each prompt.
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
