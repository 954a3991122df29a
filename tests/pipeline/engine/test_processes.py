"""Two processes learn what one learns from the same global batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config import OptimConfig, TrainedModelConfig
from pipeline.data.batches import collate_part, micro_batches
from pipeline.engine.engine import Engine
from pipeline.models.forward import Policy
from tests.distributed import rank, run_ranks, world_size
from tests.families import random_rows, tiny_causal_lm

GLOBAL_BATCHES = ((9, 2, 7, 5, 3, 8, 1), (6,))
"""Lengths of sequences; the second batch leaves a process without a row."""


@dataclass(frozen=True)
class Learned:
    """What one process made of one global batch."""

    num_micro_batches: int
    gradient: Tensor
    """Summed over processes."""

    grad_norm: float
    weights: Tensor
    """After the step."""


def learn() -> list[Learned]:
    learned: list[Learned] = []
    for lengths in GLOBAL_BATCHES:
        config = TrainedModelConfig(optim=OptimConfig(lr=1e-3, schedule="constant"))
        engine = Engine(Policy(tiny_causal_lm("llama")), config, total_steps=1)
        rows = random_rows(lengths)
        num_targets = sum(row.num_targets for row in rows)
        parts = micro_batches(lengths, max_tokens=10, num_processes=world_size(), process=rank())
        for part in parts:
            batch = collate_part([rows[row] for row in part], spare=rows[0])
            engine.backward(-engine(batch).logprobs.sum() / num_targets)
        gradient = torch.cat([each.flatten() for each in engine.gradients().values()])
        grad_norm = engine.step().grad_norm
        weights = torch.cat([group.masters.fp32() for group in engine.groups])
        learned.append(Learned(len(parts), gradient, grad_norm, weights))
    return learned


def test_two_processes_sum_to_the_gradient_of_one_and_end_with_the_same_weights() -> None:
    alone = learn()

    first, second = run_ranks(learn)

    for whole, a, b in zip(alone, first, second, strict=True):
        assert a.num_micro_batches == b.num_micro_batches
        assert (a.gradient - whole.gradient).norm() / whole.gradient.norm() < 1e-6
        assert abs(a.grad_norm / whole.grad_norm - 1) < 1e-6
        assert torch.equal(a.gradient, b.gradient)
        assert torch.equal(a.weights, b.weights)
