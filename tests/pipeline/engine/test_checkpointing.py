"""Activation checkpointing changes no bit, at any stage."""

import pytest

from tests.distributed import run_ranks
from tests.pipeline.engine.test_invariance import digest
from tests.pipeline.engine.test_stages import build, settings, train


def train_digest(stage: int, checkpointing: str) -> str:
    model = build("qwen3", "bf16", checkpointing=checkpointing)
    return digest(train(model, settings(stage, max_norm=0.5), accumulation=2).weights)


@pytest.mark.parametrize("stage", [0, 3])
def test_activation_checkpointing_changes_no_bit(stage: int) -> None:
    results = [run_ranks(train_digest, stage, kind) for kind in ("none", "full", "reentrant")]

    assert len({result for ranks in results for result in ranks}) == 1
