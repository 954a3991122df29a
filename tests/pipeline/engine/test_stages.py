"""Every ZeRO stage matches a plain trainer on one process bitwise."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import LossScaleConfig, OptimConfig, TrainedModelConfig
from pipeline.config.model import ZeroConfig
from pipeline.engine.engine import Engine
from tests.distributed import rank, run_ranks, world_size
from tests.families import VOCAB, recompute_activations, tiny_causal_lm
from tests.pipeline.engine.reference import TrainingResult, train_reference

FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"dropout": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "llama": {},
    "qwen3": {},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 2
SCALE = 16.0
"""Loss scale in fp16: a power of two, small enough that nothing overflows."""


def tokens(step: int, micro_batch: int, rank_index: int) -> Tensor:
    """Return two sequences of seven tokens, different for each step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro_batch + rank_index)
    return torch.randint(0, VOCAB, (2, 7), generator=generator)


def compute_loss(model: nn.Module, step: int, micro_batch: int, rank_index: int) -> Tensor:
    """Sum of the token losses of one micro-batch, over the tokens of all of them."""
    ids = tokens(step, micro_batch, rank_index)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    return loss / 64


def build(family: str, dtype: str, *, checkpointing: str = "none", **changes: Any) -> nn.Module:
    model = tiny_causal_lm(family, **FAMILIES[family], **changes).to(DTYPES[dtype])
    if checkpointing != "none":
        recompute_activations(model, reentrant=checkpointing == "reentrant")
        if checkpointing == "reentrant":
            model.enable_input_require_grads()
    return model.train()


def settings(
    stage: int, *, max_norm: float | None, weight_decay: float = 0.1, **zero: Any
) -> TrainedModelConfig:
    return TrainedModelConfig(
        zero_stage=stage,
        zero=ZeroConfig(**zero),
        optim=OptimConfig(
            lr=1e-2,
            schedule="constant",
            weight_decay=weight_decay,
            max_grad_norm=max_norm,
            warmup_ratio=0.0,
        ),
        fp16=LossScaleConfig(loss_scale=SCALE),
    )


def train(
    model: nn.Module,
    config: TrainedModelConfig,
    *,
    accumulation: int,
    loss: Callable[[Any, int, int, int], Tensor] = compute_loss,
) -> TrainingResult:
    engine = Engine(model, config, total_steps=STEPS)
    norms: list[float] = []
    for step in range(STEPS):
        for micro_batch in range(accumulation):
            engine.backward(loss(engine, step, micro_batch, rank()))
        norms.append(engine.step().grad_norm)
        assert not any(engine.pool._free.values())  # no memory is kept between steps
    with engine.gathered():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return TrainingResult(weights, norms)


def find_differences(result: TrainingResult, expected: TrainingResult) -> list[str]:
    """Return the names of the weights that are not bitwise identical."""
    assert result.weights.keys() == expected.weights.keys()
    return [
        name
        for name, weight in result.weights.items()
        if not torch.equal(weight, expected.weights[name])
    ]


def train_at_every_stage(family: str, dtype: str) -> list[str]:
    """Train with pairs of settings, and return the differences from the plain trainer."""
    failures: list[str] = []
    family_index = [*FAMILIES].index(family)
    for (i, accumulation), (j, max_norm) in product(enumerate((1, 4)), enumerate((None, 0.5))):
        reference = train_reference(
            build(family, dtype),
            compute_loss,
            steps=STEPS,
            world_size=world_size(),
            accumulation=accumulation,
            max_norm=max_norm,
            scale=SCALE if dtype == "fp16" else 1.0,
        )
        for stage in range(4):
            is_odd = (family_index + i + j + stage // 2 + stage) % 2
            checkpointing = "full" if is_odd else "none"
            got = train(
                build(family, dtype, checkpointing=checkpointing),
                settings(stage, max_norm=max_norm),
                accumulation=accumulation,
            )
            case = f"stage {stage}, accumulation {accumulation}, clip {max_norm}, {checkpointing}"
            failures += [f"{case}: {name}" for name in find_differences(got, reference)]
            if max(abs(a / b - 1) for a, b in zip(got.norms, reference.norms, strict=True)) > 1e-12:
                failures.append(f"{case}: norms {got.norms} instead of {reference.norms}")
    return failures


CASES = [
    # fp32 and bf16 once; the other pairs belong to the grid.
    pytest.param(family, dtype, marks=() if row == column < 2 else pytest.mark.grid)
    for row, family in enumerate(FAMILIES)
    for column, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_every_stage_matches_a_plain_trainer_bitwise(family: str, dtype: str) -> None:
    first, second = run_ranks(train_at_every_stage, family, dtype)

    assert first == second == []
