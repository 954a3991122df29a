"""A policy whose logits are computed in tiles equals one with full logits."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config import FrozenModelConfig, Kernels, OptimConfig, TrainedModelConfig
from pipeline.data.batches import TokenBatch, collate
from pipeline.engine.engine import Engine
from pipeline.models.forward.forward import LARGE_VOCABULARY, Policy, set_fp32_logits
from pipeline.models.hf.load import load_causal_lm
from tests.distributed import run_ranks
from tests.families import FAMILIES, SCALED, UNPACKED, random_rows, save_to, tiny_causal_lm

CPU = torch.device("cpu")
LENGTHS = (30, 7, 3, 12, 1)
TILE = 11 * LARGE_VOCABULARY
"""5 tiles for 48 targets and the whole vocabulary."""

NOT_A_PRODUCT = {*SCALED, "gemma2", "llama4_text"}
"""Families whose logits aren't a matrix product; the last doesn't mark the end of its blocks."""


def load_policy(family: str, directory: Path, kernels: Kernels = "auto", **changes: Any) -> Policy:
    plain = tiny_causal_lm(family, vocab_size=LARGE_VOCABULARY, **changes)
    model = load_causal_lm(FrozenModelConfig(path=save_to(plain, directory)), device=CPU)
    return Policy(model, kernels=kernels, tile=TILE)


def compute(policy: Policy, batch: TokenBatch, **settings: Any) -> list[Tensor]:
    """Return log-probabilities, entropies and all gradients."""
    policy.zero_grad()
    outputs = policy(batch, **settings)
    entropy = torch.zeros(()) if outputs.entropy is None else outputs.entropy
    (outputs.logprobs.sum() + entropy.sum()).backward()
    gradients = [param.grad for param in policy.parameters() if param.grad is not None]
    return [outputs.logprobs.detach(), entropy.detach(), *gradients]


def assert_near(results: list[Tensor], expected: list[Tensor]) -> None:
    # Some gradients are zero except for rounding, such as those of OPT's key biases.
    largest = max(gradient.abs().max().item() for gradient in expected[2:])
    for actual, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("family", [*FAMILIES, *UNPACKED, *SCALED])
def test_tiled_logits_match_full_logits_in_every_family(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load_policy(family, tmp_path)
    batch = collate(random_rows(LENGTHS))
    settings = {"temperature": 0.8, "entropy": True}

    with caplog.at_level(logging.INFO, logger="pipeline.models.forward.forward"):
        tiled = compute(policy, batch, **settings)
    full = compute(Policy(policy.model, kernels="off"), batch, **settings)

    assert_near(tiled, full)
    warnings = [line for line in caplog.messages if "are not the output layer applied to" in line]
    assert len(warnings) == (family in NOT_A_PRODUCT)


@pytest.mark.parametrize("tile", [TILE, None])
def test_fp32_head_computes_exact_logits_of_bf16_weights(tmp_path: Path, tile: int | None) -> None:
    model = load_policy("llama", tmp_path).model.bfloat16()
    model.model.norm.weight.data.mul_(4)
    batch, weight = collate(random_rows(LENGTHS)), model.lm_head.weight
    targets = batch.input_ids[batch.targets]
    rounded = Policy(model, tile=tile)
    hidden = rounded._hidden(batch).detach().double()
    exact = (hidden @ weight.double().T).log_softmax(1).gather(1, targets[:, None])[:, 0]
    (expected,) = torch.autograd.grad(exact.sum(), weight)
    assert (rounded(batch).logprobs - exact).abs().max() > 0.02

    set_fp32_logits(model)
    logprobs = Policy(model, tile=tile)(batch).logprobs

    torch.testing.assert_close(logprobs, exact.float(), rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    assert (gradient - expected).norm() < 0.01 * expected.norm()


def train(stage: int, dtype: str, uniform: bool) -> list[Tensor]:
    """Return the weights after two steps with tiled logits."""
    model = tiny_causal_lm("llama", vocab_size=LARGE_VOCABULARY)
    model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    config = TrainedModelConfig(
        zero_stage=stage, optim=OptimConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0)
    )
    engine = Engine(Policy(model, tile=TILE), config, total_steps=2)
    for step in range(2):
        batch = collate(random_rows(LENGTHS, seed=step))
        engine.backward(-engine(batch, uniform=uniform).logprobs.sum() / 100)
        engine.step()
    with engine.gathered():
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.jobs
@pytest.mark.parametrize(("dtype", "uniform"), [("fp32", False), ("bf16", True)])
def test_every_stage_gives_the_same_bits(dtype: str, uniform: bool) -> None:
    results = [run_ranks(train, stage, dtype, uniform) for stage in (0, 2, 3)]

    first = results[0][0]
    assert all(all(map(torch.equal, weights, first)) for ranks in results for weights in ranks)
