"""Divergence of the actor's distributions from a teacher's, without storing all logits.

Dimension names: K targets, V vocabulary; C targets of a tile.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.logprobs import TILE


def generalized_jsd(
    student: Float[Tensor, "C V"], teacher: Float[Tensor, "C V"], *, beta: float
) -> tuple[Float[Tensor, " C"], Float[Tensor, "C V"]]:
    """Generalized Jensen-Shannon divergence of log-probabilities (Agarwal et al. 2024, eq. 1).

    beta * KL(teacher || m) + (1 - beta) * KL(student || m), m = beta * teacher + (1 - beta) *
    student. As in TRL, 0 is KL(teacher || student), and 1 is KL(student || teacher).

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
    own = (p * ratio).sum(dim=1, keepdim=True)
    divergence = weight * own.squeeze(1)
    if beta < 1:
        divergence += beta * q.mul_(teacher - mixture).sum(dim=1)
    return divergence, ratio.sub_(own).mul_(p).mul_(weight)


class Output:
    """Logits of K targets, as hidden states and an output layer, or as they are."""

    def __init__(self, hidden: Tensor, *layer: Tensor | None) -> None:
        matrix, bias = layer or (None, None)
        self.tensors = hidden, matrix, bias
        self.vocabulary = hidden.shape[1] if matrix is None else len(matrix)

    def log_softmax(self, part: slice, end: int | None, temperature: float) -> Float[Tensor, "C V"]:
        """Log-probabilities of some targets over the first `end` tokens, or over all."""
        hidden, matrix, bias = self.tensors
        logits = hidden[part] if matrix is None else F.linear(hidden[part], matrix, bias)
        return (logits[:, :end].float() / temperature).log_softmax(dim=1)


def gkd_loss(
    student: Output,
    teacher: Output,
    targets: Int[Tensor, " K"],
    weights: Float[Tensor, " K"],
    *,
    beta: float,
    temperature: float,
    tile: int | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, " K"], Float[Tensor, " K"]]:
    """Weighted sum of the targets' `generalized_jsd`; also log pi and the reverse KL, for metrics.

    Gradients are computed with the loss, a tile of tokens at a time. Token ids that only one of the
    models has are ignored: they are padding.
    """
    return _Loss.apply(*student.tensors, teacher, targets, weights, beta, temperature, tile)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        matrix: Tensor | None,
        bias: Tensor | None,
        teacher: Output,
        targets: Tensor,
        weights: Tensor,
        beta: float,
        temperature: float,
        tile: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student, wanted = Output(hidden, matrix, bias), ctx.needs_input_grad
        size = min(student.vocabulary, teacher.vocabulary)
        of_hidden = torch.zeros_like(hidden)
        of_matrix, of_bias = (
            torch.zeros_like(each, dtype=torch.float32) if each is not None and needed else None
            for each, needed in ((matrix, wanted[1]), (bias, wanted[2]))
        )
        loss, logprobs, reverse_kl = (torch.empty_like(weights) for _ in range(3))
        # Up to eight tensors of this size exist at once.
        tile = tile or TILE.get(hidden.device.type, TILE["cpu"]) // 2
        rows = max(1, tile // size)
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            own, fixed = (each.log_softmax(part, size, temperature) for each in (student, teacher))
            pi = own if size == student.vocabulary else student.log_softmax(part, None, temperature)
            logprobs[part] = pi.gather(1, targets[part, None]).squeeze(1)
            reverse_kl[part] = (own.exp() * (own - fixed)).sum(dim=1)
            loss[part], gradient = generalized_jsd(own, fixed, beta=beta)
            del own, fixed, pi  # free memory
            gradient = gradient.mul_(weights[part, None] / temperature).to(hidden.dtype)
            if matrix is None:
                of_hidden[part, :size] = gradient
            else:
                torch.mm(gradient, matrix[:size], out=of_hidden[part])
            if of_matrix is not None:
                of_matrix[:size] += gradient.t() @ hidden[part]
            if of_bias is not None:
                of_bias[:size] += gradient.sum(dim=0, dtype=torch.float32)
        ctx.mark_non_differentiable(logprobs, reverse_kl)
        ctx.ahead, ctx.dtype = (of_hidden, of_matrix, of_bias), hidden.dtype
        return (loss * weights).sum(), logprobs, reverse_kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        ahead, ctx.ahead = ctx.ahead, None  # scaled in place, once
        gradients = (None if each is None else each.mul_(grad).to(ctx.dtype) for each in ahead)
        return *gradients, *[None] * 6
