"""The hash of the weights that generated a rollout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from inference.replica import sum_bits, weights_hash
from pipeline.config import FrozenModelConfig, LoraConfig, Precision, TrainedModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.models.hf.export import export
from pipeline.models.hf.load import load_causal_lm
from tests.distributed import run_ranks
from tests.families import save_to, tiny_causal_lm
from tests.inference.actors import CPU, LORA, Actor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_shards_that_split_words_add_up_to_that_of_the_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)).to(dtype)

    parts = [sum_bits(weight[:, :5]), sum_bits(weight[:, 5:], first=5)]

    assert sum(parts) == sum_bits(weight)
    assert sum_bits(torch.ones(1, dtype=torch.bfloat16), first=1) == 0x3F80 << 16


def hash_updates(path: str, tp_size: int, stage: int, lora: LoraConfig | None) -> list[int]:
    actor = Actor(path, tp_size=tp_size, zero_stage=stage, lora=lora, precision="bf16")
    values: list[int] = []
    for _ in range(3):
        for _ in range(2):
            with actor.hybrid.generating():
                pass
            values.append(actor.hybrid.weights_hash)
        actor.learn()
    return values


@pytest.mark.jobs
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "LoRA"])
def test_hash_follows_updates_and_does_not_depend_on_sharding(
    lora: LoraConfig | None, tmp_path: Path
) -> None:
    path = save_to(tiny_causal_lm("llama").bfloat16(), tmp_path)
    untrained = weights_hash(
        load_causal_lm(TrainedModelConfig(path=path, precision="bf16"), device=CPU)
    )
    layouts = [
        run_ranks(hash_updates, path, tp, stage, lora) for tp, stage in ((1, 0), (2, 1), (2, 3))
    ]

    first = layouts[0][0]

    assert all(ranks == first for layout in layouts for ranks in layout)
    assert first[0] == untrained
    assert [first[index] == first[index + 1] for index in (0, 2, 4)] == [True] * 3
    assert len(set(first)) == 3


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"lora": LORA, "quantize": "nf4"}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_hash_equals_that_of_the_exported_model(
    llama: str, precision: Precision, changes: dict[str, Any], tmp_path: Path
) -> None:
    actor = Actor(llama, precision=precision, **changes)
    actor.train_after_sync()
    with actor.hybrid.generating():
        pass
    export(actor.model, build_tokenizer(), tmp_path, weights=actor.engine)

    exported = FrozenModelConfig(path=str(tmp_path), precision=precision)

    assert actor.hybrid.weights_hash == weights_hash(load_causal_lm(exported, device=CPU))
