"""Bradley-Terry loss on the scores of pairs."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def pairwise_loss(
    chosen: Float[Tensor, " B"],
    rejected: Float[Tensor, " B"],
    *,
    margin: Float[Tensor, " B"] | None = None,
    center_coef: float = 0.0,
) -> Float[Tensor, ""]:
    """-log sigmoid(r_chosen - r_rejected - margin), summed over pairs.

    Ouyang et al. 2022, eq. 1; the margin as in Touvron et al. 2023, eq. 2. `center_coef` adds
    center_coef * (r_chosen + r_rejected)^2, which holds scores near 0 (Eisenstein et al. 2023,
    section 3): the pairwise term alone leaves their level free. The caller divides by the number of
    pairs of the whole optimizer step.
    """
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    return (-F.logsigmoid(difference) + center_coef * (chosen + rejected).square()).sum()
