"""Activation checkpointing and compilation change no bit, at any stage."""

import pytest
import torch

from pipeline.engine.engine import Engine
from tests.distributed import run_ranks
from tests.pipeline.engine.test_invariance import digest
from tests.pipeline.engine.test_stages import build, settings, train


def checkpointed(stage: int, way: str) -> str:
    model = build("qwen3", "bf16", checkpointing=way)
    return digest(train(model, settings(stage, max_norm=0.5), accumulation=2).weights)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reentrant_or_not_checkpointing_changes_no_bit(stage: int) -> None:
    ended = [run_ranks(checkpointed, stage, way) for way in ("none", "full", "reentrant")]

    assert len({weights for ranks in ended for weights in ranks}) == 1


def compiled(stage: int) -> tuple[str, str]:
    """Weights with and without `torch.compile` of each block, by a backend without fusion."""
    plain = train(build("llama", "fp32"), settings(stage, max_norm=None), accumulation=1)
    model = build("llama", "fp32")
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    got = train(model, settings(stage, max_norm=None), accumulation=1)
    return digest(plain.weights), digest(got.weights)


@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_blocks_change_no_bit(stage: int) -> None:
    (plain, got), _ = run_ranks(compiled, stage)

    assert plain == got


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own modules
def test_the_engine_compiles_each_block_if_told_so() -> None:
    model = build("llama", "fp32")
    before = [layer.forward for layer in model.model.layers]

    Engine(model, settings(0, max_norm=None, compile=True), total_steps=1)

    for layer, forward in zip(model.model.layers, before, strict=True):
        assert layer.forward is not forward
        assert hasattr(layer.forward, "_torchdynamo_orig_callable")
