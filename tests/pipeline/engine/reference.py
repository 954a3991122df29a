"""A plain trainer on one process, the reference of the engine's tests.

It shares no code with the engine, and has neither shards nor flat vectors. It defines the order of
additions: the gradient of a micro-batch is summed over ranks in a pairwise tree, then added to the
sum of the previous micro-batches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class TrainingResult:
    """Result of training."""

    weights: dict[str, Tensor]
    norms: list[float]


def train_reference(
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
) -> TrainingResult:
    """Train with AdamW; `compute_loss(model, step, micro_batch, rank)` is a share of the loss."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for param in params.values():  # also if a tied weight gets two gradients in one pass
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
            rank_gradients = []
            for rank in range(world_size):
                (scale * compute_loss(model, step, micro_batch, rank)).backward()
                rank_gradients.append({name: p.grad for name, p in params.items()})
                model.zero_grad()
            summed = {
                name: sum_pairwise([grads[name] for grads in rank_gradients]) for name in params
            }
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
                param.data.copy_(round_to(masters[name].detach(), param.dtype))
    return TrainingResult({name: p.detach().clone() for name, p in model.named_parameters()}, norms)


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest; in bf16 with ties away from zero."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    # The bits of an fp32 number are its sign and magnitude; bf16 is the upper half of them.
    return ((values.view(torch.int32) + 0x8000) >> 16).short().view(torch.bfloat16)


def sum_pairwise(tensors: Sequence[Tensor]) -> Tensor:
    """Sum adjacent tensors, then adjacent sums, and so on."""
    if len(tensors) == 1:
        return tensors[0]
    sums = [tensors[i] + tensors[i + 1] for i in range(0, len(tensors) - 1, 2)]
    return sum_pairwise([*sums, *tensors[len(sums) * 2 :]])
