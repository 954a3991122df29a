"""The engine compared with a plain loop in PyTorch; skipped steps, learning rates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.engine.engine import Engine, NonFiniteGradientError
from pipeline.models.adapters.lora import add_lora
from pipeline.models.forward.forward import Scorer
from tests.families import tiny_causal_lm, tiny_classifier


def settings(**optim: object) -> TrainedModelConfig:
    constant = {"lr": 0.01, "schedule": "constant", "warmup_ratio": 0.0, **optim}
    return TrainedModelConfig(optim=OptimConfig(**constant))


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def squared_sum(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return model(batch).float().square().sum()


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_training_matches_a_plain_loop_with_adamw(max_grad_norm: float | None) -> None:
    plain, model = network(), network()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=True,
    )
    config = settings(weight_decay=0.1, max_grad_norm=max_grad_norm)
    engine = Engine(model, config, total_steps=5)
    norms = []

    for step in range(5):
        for batch in torch.randn(8, 7, generator=torch.Generator().manual_seed(step)).split(4):
            squared_sum(plain, batch).backward()
            engine.backward(squared_sum(engine, batch))
        limit = max_grad_norm or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        result = engine.step()
        assert result.grad_norm == pytest.approx(norms[-1], rel=1e-6)
        assert (result.lr, result.skipped) == (0.01, False)

    # Not bitwise: the optimizer steps one flat vector, which has different SIMD remainders, and the
    # norm is summed in fp64.
    for (name, expected), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=name)
    assert min(norms) > 0.5


def test_weight_decay_skips_biases_and_norms_and_needs_no_gradient() -> None:
    model = network()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    engine = Engine(model, settings(lr=0.5, weight_decay=0.1), total_steps=1)

    # A zero gradient for one parameter and none for the others: only decay changes the weights.
    engine.backward((0.0 * next(model.parameters())).sum())
    engine.step()

    for param in model.parameters():
        expected = 2.0 * (1 - 0.5 * 0.1) if param.ndim > 1 else 2.0
        assert torch.equal(param, torch.full_like(param, expected))


def test_repeated_non_finite_gradients_raise_with_advice() -> None:
    model = nn.Linear(1, 1, bias=False)
    weight = model.weight.item()
    engine = Engine(model, settings(), total_steps=100)

    def step() -> None:
        engine.backward(engine(torch.full((1,), float("nan"))).sum())
        engine.step()

    for _ in range(20 - 1):
        step()
    with pytest.raises(NonFiniteGradientError, match="20 steps in a row, last in root; lower the"):
        step()

    assert model.weight.item() == weight


@pytest.mark.parametrize(("lr", "expected"), [(None, 1e-3), (3e-4, 3e-4)])
def test_reported_learning_rate_is_that_of_the_adapters(lr: float | None, expected: float) -> None:
    lora = LoraConfig(rank=2, lr=lr)
    model = add_lora(tiny_causal_lm("llama"), lora, task="causal", seed=0)
    optim = OptimConfig(lr=1e-4, schedule="constant", warmup_ratio=0.0, weight_decay=0.0, eps=1e-12)
    engine = Engine(model, TrainedModelConfig(optim=optim, lora=lora), total_steps=1)

    engine.backward(engine(input_ids=torch.tensor([[1, 2, 3, 4]])).logits.float().square().sum())
    result = engine.step()

    # Adam's first step is the rate, with the sign of the gradient, from B = 0.
    updates = [
        param.abs().max().item() for name, param in model.named_parameters() if "lora_B" in name
    ]
    assert result.lr == pytest.approx(expected)
    assert updates == pytest.approx([expected] * len(updates), rel=1e-3)


def test_score_head_next_to_adapters_has_the_base_learning_rate() -> None:
    lora = LoraConfig(rank=2)
    model = add_lora(tiny_classifier("llama"), lora, task="classifier", seed=0)
    config = TrainedModelConfig(optim=OptimConfig(lr=1e-3, schedule="constant"), lora=lora)

    engine = Engine(Scorer(model), config, total_steps=1)

    groups = [group for group in engine.groups if group.flat.settings.lr == 1e-3]
    (name,) = [name for group in groups for name in group.flat.params]
    assert ".score." in name
