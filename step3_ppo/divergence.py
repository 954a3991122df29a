"""Divergence of the actor's distributions from a teacher's, without storing all logits.

Dimension names: K targets, V vocabulary; C targets of a tile.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.logprobs import TILE, output_layer


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

    def log_softmax(self, part: slice, end: int | None, temperature: float) -> Float[Tensor, "C V"]:
        """Return the log-probabilities of the first `end` token ids, or of all, at some targets."""
        hidden, matrix, bias = self.tensors
        logits = hidden[part] if matrix is None else output_layer(hidden[part], matrix, bias)
        return (logits[:, :end].float() / temperature).log_softmax(dim=1)


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
    ignore token ids that only one of the models has, since these are padding.
    """
    return _GKDLoss.apply(*student.tensors, teacher, targets, weights, beta, temperature, tile)


class _GKDLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        matrix: Tensor | None,
        bias: Tensor | None,
        teacher: Logits,
        targets: Tensor,
        weights: Tensor,
        beta: float,
        temperature: float,
        tile: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student, needs_grad = Logits(hidden, matrix, bias), ctx.needs_input_grad
        vocab = min(student.vocab_size, teacher.vocab_size)
        is_shared = vocab == student.vocab_size
        dtype = hidden.dtype if matrix is None else matrix.dtype
        low = hidden.to(dtype)
        hidden_grad = torch.zeros_like(low)
        matrix_grad, bias_grad = (
            torch.zeros_like(param, dtype=torch.float32) if param is not None and needed else None
            for param, needed in ((matrix, needs_grad[1]), (bias, needs_grad[2]))
        )
        loss, logprobs, reverse_kl = (torch.empty_like(weights) for _ in range(3))
        # Up to eight tensors of this size exist at once.
        tile = tile or TILE.get(hidden.device.type, TILE["cpu"]) // 2
        chunk = max(1, tile // vocab)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            log_p = student.log_softmax(part, vocab, temperature)
            log_q = teacher.log_softmax(part, vocab, temperature)
            pi = log_p if is_shared else student.log_softmax(part, None, temperature)
            logprobs[part] = pi.gather(1, targets[part, None]).squeeze(1)
            reverse_kl[part] = (log_p.exp() * (log_p - log_q)).sum(dim=1)
            loss[part], gradient = generalized_jsd(log_p, log_q, beta=beta)
            del log_p, log_q, pi  # free memory
            gradient = gradient.mul_(weights[part, None] / temperature).to(dtype)
            if matrix is None:
                hidden_grad[part, :vocab] = gradient
            else:
                torch.mm(gradient, matrix[:vocab], out=hidden_grad[part])
            if matrix_grad is not None:
                matrix_grad[:vocab] += gradient.t() @ low[part]
            if bias_grad is not None:
                bias_grad[:vocab] += gradient.sum(dim=0, dtype=torch.float32)
        ctx.mark_non_differentiable(logprobs, reverse_kl)
        ctx.gradients, ctx.dtype = (hidden_grad, matrix_grad, bias_grad), dtype
        return (loss * weights).sum(), logprobs, reverse_kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        stored, ctx.gradients = ctx.gradients, None  # scaled in place, once
        gradients = (None if x is None else x.mul_(grad).to(ctx.dtype) for x in stored)
        return *gradients, *[None] * 6
