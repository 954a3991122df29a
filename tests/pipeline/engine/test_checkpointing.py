"""Activation checkpointing and compilation change no bit, at any stage."""

from pathlib import Path

import pytest
import torch

from pipeline.config import DataConfig, OptimConfig, TrainedModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.engine.engine import Engine
from pipeline.models.hf.chat import load_chat
from pipeline.models.trained import trained_causal_lm
from tests.distributed import run_ranks
from tests.families import tiny_causal_lm
from tests.pipeline.engine.test_invariance import digest
from tests.pipeline.engine.test_stages import build, settings, train


def checkpointed(stage: int, way: str) -> str:
    model = build("qwen3", "bf16", checkpointing=way)
    return digest(train(model, settings(stage, max_norm=0.5), accumulation=2).weights)


@pytest.mark.parametrize("stage", [0, 3])
def test_reentrant_or_not_checkpointing_changes_no_bit(stage: int) -> None:
    ended = [run_ranks(checkpointed, stage, way) for way in ("none", "full", "reentrant")]

    assert len({weights for ranks in ended for weights in ranks}) == 1


def recomputed(every: int, start: str) -> list[int]:
    """How often each block of a loaded model runs in a forward and a backward pass."""
    optim = OptimConfig(lr=1e-3)
    config = TrainedModelConfig(
        path=start, gradient_checkpointing=True, checkpoint_every=every, optim=optim, zero_stage=3
    )
    tokenizer, _ = load_chat(config, DataConfig())
    model = trained_causal_lm(config, tokenizer, device=torch.device("cpu"), seed=0)
    runs = [0] * 4
    for number, block in enumerate(model.model.layers):
        block.mlp.register_forward_pre_hook(
            lambda *_, number=number: runs.__setitem__(number, runs[number] + 1)
        )
    engine = Engine(model, config, total_steps=1)
    ids = torch.arange(20, 29)[None]
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    return runs


@pytest.mark.parametrize(
    ("every", "runs"), [(1, [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (3, [2, 1, 1, 2])]
)
def test_every_so_many_blocks_may_be_recomputed(
    every: int, runs: list[int], tmp_path: Path
) -> None:
    tokenizer = build_tokenizer()
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer), num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    assert recomputed(every, str(tmp_path)) == runs
