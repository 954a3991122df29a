"""Embedding and output layer are whole only around their own use, however a pass uses them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import LoraConfig
from pipeline.data.batches import collate
from pipeline.engine.engine import Engine, FrozenEngine
from pipeline.engine.sharding.units import engine_units
from pipeline.models.adapters.lora import add_lora
from pipeline.models.forward.forward import Policy, Scorer
from tests.distributed import rank, run_ranks
from tests.families import random_rows, tiny_causal_lm, tiny_classifier
from tests.pipeline.engine.inspection import count_gathered_bytes, get_gradients
from tests.pipeline.engine.test_stages import settings

WORDS = 8192
"""Of a vocabulary whose logits are computed in pieces, by the matrix without its module."""


def kinds(model: nn.Module) -> list[str]:
    return [unit.kind for unit in engine_units(model)]


def test_only_matrices_of_one_use_are_units_of_their_own() -> None:
    untied = Policy(tiny_causal_lm("llama"))
    adapted = add_lora(
        tiny_causal_lm("llama"), LoraConfig(rank=2, targets=("lm_head",)), task="causal", seed=0
    )

    assert kinds(untied) == ["embedding", "block", "block", "head", "root"]
    first, *_, head, root = engine_units(untied)
    assert list(first.params) == ["model.model.embed_tokens.weight"]
    assert list(head.params) == ["model.lm_head.weight"]
    assert list(root.params) == ["model.model.norm.weight"]
    assert kinds(tiny_causal_lm("llama", tie_word_embeddings=True)) == ["block", "block", "root"]
    assert kinds(Scorer(tiny_classifier("llama"))) == ["embedding", "block", "block", "root"]
    assert kinds(adapted) == ["embedding", "block", "block", "root"]
    assert kinds(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))) == ["root"]


def policy(kernels: Any) -> Policy:
    model = tiny_causal_lm("llama", vocab_size=WORDS)
    return Policy(model, kernels=kernels, tile=4 * WORDS)


def compute_loss(engine: Any, seed: int) -> Tensor:
    """Of sequences of unlike lengths: the model, which knows only padding, runs several times."""
    batch = collate(random_rows((40, 3, 21, 5), seed=2 * seed + rank()))
    return engine(batch).logprobs.square().sum() / 64


def learned(stage: int, kernels: Any) -> tuple[dict[str, Tensor], list[int], int]:
    """Gradients; the most that was whole at a block, and what of it no block needs.

    Of two micro-batches, of which the second has two passes before it goes back.
    """
    engine = Engine(policy(kernels), settings(stage, max_norm=None), total_steps=1)
    seen: list[int] = []
    blocks = [unit for unit in engine.zero.units if unit.kind == "block"]
    for unit in blocks:
        unit.module.register_forward_hook(
            lambda *_: seen.append(count_gathered_bytes(engine.zero)), prepend=True
        )
    engine.backward(compute_loss(engine, 0))
    engine.backward(compute_loss(engine, 1) + compute_loss(engine, 2))
    gradients = get_gradients(engine)
    assert count_gathered_bytes(engine.zero) == 0
    table = sum(4 * flat.numel for flat in engine.zero.units[0].flats)
    return gradients, seen, table


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_gradients_are_those_of_stage_0_and_no_matrix_is_there_while_blocks_compute(
    kernels: str,
) -> None:
    expected = run_ranks(learned, 0, kernels)

    for (plain, _, _), (found, seen, table) in zip(
        expected, run_ranks(learned, 3, kernels), strict=True
    ):
        assert all(torch.equal(found[name], plain[name]) for name in plain)
        assert any(each.count_nonzero() for each in found.values())
        assert max(seen) < table


def scored(kernels: Any) -> tuple[Tensor, int]:
    config = settings(3, max_norm=None)
    engine = FrozenEngine(policy(kernels), config)
    with torch.no_grad():
        found = engine(collate(random_rows((40, 3, 21, 5)))).logprobs
    zero: Any = engine._zero
    return found, count_gathered_bytes(zero)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_a_frozen_model_says_the_same_and_keeps_nothing(kernels: Any) -> None:
    with torch.no_grad():
        expected = policy(kernels)(collate(random_rows((40, 3, 21, 5)))).logprobs

    for found, kept in run_ranks(scored, kernels):
        assert torch.equal(found, expected)
        assert kept == 0
