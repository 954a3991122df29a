"""Log-probabilities and entropy from logits that are there, a few rows at a time.

In fp32, logits, their softmax and its gradient would be several tensors of the logits' size. Here
they exist for some rows only, which stay in the cache. What is kept for the way back is the logits
themselves: their softmax is computed again, which costs less than to write and read it. The bits
are those of the definition, `pipeline.kernels.reference.logprobs_of`, for rows are independent.

Dimension names: K targets, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.kernels.logprobs import TILE
from pipeline.kernels.reference import NO_TARGET

ROWS = {"cpu": 2**20, "cuda": TILE["cuda"]}
"""Logits of the rows of one turn, by device: 4 and 256 MiB of fp32."""


def row_logprobs(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, " K"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    at_once: int | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probability of each target under softmax(logits), and the entropy.

    Args:
        logits: of any number format; they must stay as they are until the backward pass.
        targets: token ids.
        temperature: divides the logits.
        entropy: whether the entropy of each distribution is asked for; it has no graph.
        at_once: logits of the rows of one turn, two rows at least; by default `ROWS` of them.

    Returns:
        Log-probabilities and entropies in nats, fp32; None for an entropy that nobody asked for.

    Raises:
        ValueError: logits and targets don't fit together; the sentence says how.
    """
    check(logits, targets)
    at_once = at_once or ROWS.get(logits.device.type, ROWS["cpu"])
    return _Rows.apply(logits, targets, temperature, entropy, at_once)


def check(logits: Tensor, targets: Tensor) -> None:
    """Raise unless there is a row of logits for each target.

    Raises:
        ValueError: one sentence, which names what does not fit.
    """
    if logits.ndim != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"log-probabilities: logits must be numbers of (targets, words), and are"
            f" {logits.dtype} of shape {tuple(logits.shape)}"
        )
    if targets.dtype != torch.int64 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"log-probabilities of {len(logits)} rows of logits: targets must be as many of int64,"
            f" and are {targets.dtype} of shape {tuple(targets.shape)}"
        )
    if targets.device != logits.device:
        raise ValueError(
            f"log-probabilities: logits are on {logits.device}, the targets on {targets.device}"
        )


class _Rows(torch.autograd.Function):
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
        ctx.set_materialize_grads(False)
        ctx.uses_inputs_alone = True  # for pipeline.engine.graph: it reaches no parameter
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
        if grad is None:
            return (None,) * 5
        logits, targets = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        for rows in _turns(logits, ctx.at_once):
            of_rows = _log_softmax(logits[rows], ctx.temperature)
            chosen = torch.zeros_like(of_rows).scatter_(1, targets[rows, None], grad[rows, None])
            here = torch.ops.aten._log_softmax_backward_data(  # noqa: SLF001
                chosen, of_rows, -1, torch.float32
            )
            of_logits[rows] = here if ctx.temperature == 1.0 else here.div_(ctx.temperature)
            del of_rows, chosen, here
        return of_logits, None, None, None, None


def _log_softmax(logits: Float[Tensor, "R V"], temperature: float) -> Float[Tensor, "R V"]:
    logits = logits.float()
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def _turns(logits: Float[Tensor, "K V"], at_once: int) -> list[slice]:
    """Alike, and none of a single row where there are more: PyTorch adds up one sum otherwise."""
    count, words = logits.shape
    turns = max(1, min(math.ceil(count * words / at_once), count // 2))
    return [slice(count * turn // turns, count * (turn + 1) // turns) for turn in range(turns)]
