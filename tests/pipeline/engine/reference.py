"""A plain trainer on one process, the oracle of the engine's tests: no sharding, no flat vectors.

It shares no code with the engine. What it states is the order of additions: the gradient of a
micro-batch is summed over ranks, neighbours first, then added to the sum of the micro-batches
before it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Trained:
    """Result of training."""

    weights: dict[str, Tensor]
    norms: list[float]


def train_plainly(
    model: nn.Module,
    compute_loss: Callable[[nn.Module, int, int, int], Tensor],
    *,
    steps: int,
    world_size: int,
    accumulation: int,
    max_norm: float | None,
    lr: float = 1e-2,
    weight_decay: float = 0.1,
    scale: float = 1.0,
) -> Trained:
    """Train with AdamW; `compute_loss(model, step, micro_batch, rank)` is a share of the loss."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for param in params.values():  # also where a tied weight gets two gradients in one pass
        param.grad_dtype = torch.float32
    masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in params.items()}
    kinds = [(0.0, [m for m in masters.values() if m.ndim < 2])]
    kinds.append((weight_decay, [m for m in masters.values() if m.ndim > 1]))
    optimizer = torch.optim.AdamW(
        [{"params": ms, "weight_decay": decay} for decay, ms in kinds if ms],
        lr=lr, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    norms: list[float] = []
    for step in range(steps):
        total: dict[str, Tensor] = {}
        for micro_batch in range(accumulation):
            by_rank = []
            for rank in range(world_size):
                (scale * compute_loss(model, step, micro_batch, rank)).backward()
                by_rank.append({name: p.grad for name, p in params.items()})
                model.zero_grad()
            summed = {name: pairwise([grads[name] for grads in by_rank]) for name in params}
            total = {name: total[name] + g for name, g in summed.items()} if total else summed
        squares = [g.double().square().sum().item() for g in total.values()]
        norm = math.sqrt(math.fsum(squares)) / scale
        norms.append(norm)
        if math.isfinite(norm):
            factor = (min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0) / scale
            for name, master in masters.items():
                master.grad = total[name] * factor if factor != 1.0 else total[name]
            optimizer.step()
            for name, param in params.items():
                param.data.copy_(rounded(masters[name].detach(), param.dtype))
    return Trained({name: p.detach().clone() for name, p in model.named_parameters()}, norms)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest; of two bf16 equally near to that of larger magnitude."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    # As an integer fp32 is a magnitude, but for the sign, and bf16 its upper half.
    return ((values.view(torch.int32) + 0x8000) >> 16).short().view(torch.bfloat16)


def pairwise(parts: Sequence[Tensor]) -> Tensor:
    """Neighbours first, then the pairs, and so on."""
    if len(parts) == 1:
        return parts[0]
    sums = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
    return pairwise([*sums, *parts[len(sums) * 2 :]])
