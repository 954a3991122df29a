"""Divergence of the actor's distributions from a teacher's, without storing all logits.

Dimension names: K targets, V vocabulary; C targets of a tile.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.kernels.logprobs import TiledLoss, output_layer


def generalized_jsd(
    student: Float[Tensor, "C V"], teacher: Float[Tensor, "C V"], *, beta: float
) -> tuple[Float[Tensor, " C"], Float[Tensor, "C V"]]:
    """Compute the generalized Jensen-Shannon divergence (Agarwal et al. 2024, eq. 1).

    beta * KL(teacher || m) + (1 - beta) * KL(student || m), m = beta * teacher + (1 - beta) *
    student. As in TRL, beta 0 is KL(teacher || student), and beta 1 is KL(student || teacher).

    Returns:
        The divergences, and their gradients with respect to the student's logits.
    """
    p, q = student.exp(), teacher.exp()
    if beta == 0:
        return q.mul(teacher - student).sum(dim=1), p.sub_(q)
    if beta == 1:
        mixture, weight = teacher, 1.0
    else:
        mixture, weight = torch.lerp(p, q, beta), 1 - beta
        mixture.clamp_(min=torch.finfo(p.dtype).tiny).log_()
    ratio = student - mixture
    kl = (p * ratio).sum(dim=1, keepdim=True)
    divergence = weight * kl.squeeze(1)
    if beta < 1:
        divergence += beta * q.mul_(teacher - mixture).sum(dim=1)
    return divergence, ratio.sub_(kl).mul_(p).mul_(weight)


class Logits:
    """Logits of K targets, stored either as hidden states and an output layer or directly."""

    def __init__(self, hidden: Tensor, *layer: Tensor | None) -> None:
        matrix, bias = layer or (None, None)
        self.tensors = hidden, matrix, bias
        self.vocab_size = hidden.shape[1] if matrix is None else len(matrix)

    def __getitem__(self, part: slice) -> Float[Tensor, "C V"]:
        """Return the logits of a slice of the targets, in fp32."""
        hidden, matrix, bias = self.tensors
        logits = hidden[part] if matrix is None else output_layer(hidden[part], matrix, bias)
        return logits.float()


def gkd_loss(
    student: Logits,
    teacher: Logits,
    targets: Int[Tensor, " K"],
    weights: Float[Tensor, " K"],
    *,
    beta: float,
    temperature: float,
    tile: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Return the weighted sum of `generalized_jsd` and, for metrics, log pi and the reverse KL.

    Gradients are computed together with the loss, one tile of targets at a time. The divergences
    ignore token ids that only one vocabulary contains, since these are padding.
    """
    vocab = min(student.vocab_size, teacher.vocab_size)
    logprobs, reverse_kl = torch.empty_like(weights), torch.empty_like(weights)

    def compute_tile(part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits.div_(temperature)
        log_pi = logits.gather(1, targets[part, None]) - logits.logsumexp(dim=1, keepdim=True)
        logprobs[part] = log_pi.squeeze(1)
        log_p = logits[:, :vocab]  # in place, to save memory
        log_p.sub_(log_p.logsumexp(dim=1, keepdim=True))
        log_q = (teacher[part][:, :vocab] / temperature).log_softmax(dim=1)
        reverse_kl[part] = (log_p.exp() * (log_p - log_q)).sum(dim=1)
        loss, gradient = generalized_jsd(log_p, log_q, beta=beta)
        return loss * weights[part], gradient.mul_(weights[part, None] / temperature)

    return TiledLoss.apply(*student.tensors, compute_tile, tile), logprobs, reverse_kl
