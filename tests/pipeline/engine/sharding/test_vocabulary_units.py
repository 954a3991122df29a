"""Embeddings and output layers are gathered only while they are used."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import LoraConfig
from pipeline.data.batches import collate
from pipeline.engine.engine import Engine, FrozenEngine
from pipeline.engine.sharding.units import get_engine_units
from pipeline.models.adapters.lora import add_lora
from pipeline.models.forward.forward import Policy, Scorer
from tests.distributed import rank, run_ranks
from tests.families import random_rows, tiny_causal_lm, tiny_classifier
from tests.pipeline.engine.inspection import count_gathered_bytes, get_gradients
from tests.pipeline.engine.test_stages import settings

VOCAB_SIZE = 8192
"""Large enough that logits are computed in tiles, from the matrix without its module."""


def kinds(model: nn.Module) -> list[str]:
    return [unit.kind for unit in get_engine_units(model)]


def test_only_matrices_with_one_use_are_separate_units() -> None:
    untied = Policy(tiny_causal_lm("llama"))
    adapted = add_lora(
        tiny_causal_lm("llama"), LoraConfig(rank=2, targets=("lm_head",)), task="causal", seed=0
    )

    assert kinds(untied) == ["embedding", "block", "block", "head", "root"]
    first, *_, head, root = get_engine_units(untied)
    assert list(first.params) == ["model.model.embed_tokens.weight"]
    assert list(head.params) == ["model.lm_head.weight"]
    assert list(root.params) == ["model.model.norm.weight"]
    assert kinds(tiny_causal_lm("llama", tie_word_embeddings=True)) == ["block", "block", "root"]
    assert kinds(Scorer(tiny_classifier("llama"))) == ["embedding", "block", "block", "root"]
    assert kinds(adapted) == ["embedding", "block", "block", "root"]
    assert kinds(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))) == ["root"]


def make_policy(kernels: Any) -> Policy:
    model = tiny_causal_lm("llama", vocab_size=VOCAB_SIZE)
    return Policy(model, kernels=kernels, tile=4 * VOCAB_SIZE)


def compute_loss(engine: Any, seed: int) -> Tensor:
    """Compute the loss of sequences of different lengths; the model runs several times."""
    batch = collate(random_rows((40, 3, 21, 5), seed=2 * seed + rank()))
    return engine(batch).logprobs.square().sum() / 64


def compute_gradients(stage: int, kernels: Any) -> tuple[dict[str, Tensor], list[bool]]:
    """Return gradients, and whether the embedding was gathered after each block."""
    engine = Engine(make_policy(kernels), settings(stage, max_norm=None), total_steps=1)
    gathered: list[bool] = []
    embedding, *others = engine.zero.units
    blocks = [unit for unit in others if unit.kind == "block"]
    for unit in blocks:
        unit.module.register_forward_hook(
            lambda *_: gathered.append(embedding.gathered), prepend=True
        )
    engine.backward(compute_loss(engine, 0))
    engine.backward(compute_loss(engine, 1) + compute_loss(engine, 2))
    gradients = get_gradients(engine)
    assert count_gathered_bytes(engine.zero) == 0
    return gradients, gathered


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_gradients_match_stage_0_and_blocks_run_without_the_embedding(kernels: str) -> None:
    expected = run_ranks(compute_gradients, 0, kernels)

    for (plain, _), (sharded, gathered) in zip(
        expected, run_ranks(compute_gradients, 3, kernels), strict=True
    ):
        assert all(torch.equal(sharded[name], plain[name]) for name in plain)
        assert any(gradient.count_nonzero() for gradient in sharded.values())
        assert gathered
        assert not any(gathered)


def run_frozen_model(kernels: Any) -> tuple[Tensor, int]:
    config = settings(3, max_norm=None)
    engine = FrozenEngine(make_policy(kernels), config)
    with torch.no_grad():
        logprobs = engine(collate(random_rows((40, 3, 21, 5)))).logprobs
    zero: Any = engine._zero
    return logprobs, count_gathered_bytes(zero)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_frozen_model_matches_plain_model_and_frees_its_weights(kernels: Any) -> None:
    with torch.no_grad():
        expected = make_policy(kernels)(collate(random_rows((40, 3, 21, 5)))).logprobs

    for logprobs, gathered_bytes in run_ranks(run_frozen_model, kernels):
        assert torch.equal(logprobs, expected)
        assert gathered_bytes == 0
