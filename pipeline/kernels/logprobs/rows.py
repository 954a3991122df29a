"""Log-probabilities and entropy from logits that are there, a few rows at a time.

In fp32, logits, their softmax and its gradient would be several tensors of the logits' size. Here
they exist for some rows only, which stay in the cache. What is kept for the way back is the logits
themselves: their softmax is computed again, which costs less than to write and read it. The bits
are those of the definition, `definition.logprobs_of`, for rows are independent.

Dimension names: K targets, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.logprobs.definition import NO_TARGET

_softmax_gradient = torch.ops.aten._log_softmax_backward_data  # noqa: SLF001


class RowLogprobs(torch.autograd.Function):
    """The softmax of some rows, computed again on the way back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,  # noqa: FBT001  # torch passes by position
        at_once: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities, and entropies if they are asked for."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.at_once = temperature, at_once
        logprobs = logits.new_empty(len(targets), dtype=torch.float32)
        entropies = torch.empty_like(logprobs) if entropy else None
        for rows in _turns(logits, at_once):
            of_rows = _log_softmax(logits[rows], temperature)
            logprobs[rows] = -F.nll_loss(
                of_rows, targets[rows], ignore_index=NO_TARGET, reduction="none"
            )
            if entropies is not None:
                entropies[rows] = -of_rows.exp().mul_(of_rows).sum(dim=-1)
            del of_rows  # before the next turn
        ctx.save_for_backward(logits, targets)
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient of the logits."""
        if grad is None:
            return (None,) * 5
        logits, targets = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        turns = _turns(logits, ctx.at_once)
        most = max((rows.stop - rows.start for rows in turns), default=0)
        zeros = logits.new_zeros(most, logits.shape[1], dtype=torch.float32)
        for rows in turns:
            of_rows = _log_softmax(logits[rows], ctx.temperature)
            words = targets[rows, None]
            chosen = zeros[: len(words)].scatter_(1, words, grad[rows, None])
            if logits.dtype == torch.float32:
                here = of_logits[rows]
                _softmax_gradient.out(chosen, of_rows, -1, torch.float32, out=here)
            else:
                here = _softmax_gradient(chosen, of_rows, -1, torch.float32)
            if ctx.temperature != 1.0:
                here.div_(ctx.temperature)
            if logits.dtype != torch.float32:
                of_logits[rows] = here
            chosen.scatter_(1, words, 0.0)
            del of_rows, here  # before the next turn
        return of_logits, None, None, None, None


def _log_softmax(logits: Float[Tensor, "R V"], temperature: float) -> Float[Tensor, "R V"]:
    logits = logits.float()
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def _turns(logits: Float[Tensor, "K V"], at_once: int) -> list[slice]:
    """Alike, and none of a single row where there are more: PyTorch adds up one sum otherwise."""
    count, words = logits.shape
    turns = max(1, min(math.ceil(count * words / at_once), count // 2))
    return [slice(count * turn // turns, count * (turn + 1) // turns) for turn in range(turns)]
