"""The hash of the weights that a rollout was generated with."""

from pathlib import Path

import pytest
import torch
from torch import nn

from inference.weights.hash import bits_sum, weights_hash
from pipeline.config import (
    FrozenModelConfig,
    LoraConfig,
    Precision,
    TrainedModelConfig,
)
from pipeline.demo.model import build_tokenizer
from pipeline.models.export import export
from pipeline.models.load import load_causal_lm
from tests.distributed import run_ranks
from tests.families import saved, tiny_causal_lm
from tests.step3_ppo.actors import CPU, LORA, Actor


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_causal_lm("llama"), tmp_path_factory.mktemp("llama"))


def hashes(path: str, tp_size: int, stage: int, lora: LoraConfig | None) -> list[int]:
    actor = Actor(path, tp_size=tp_size, zero_stage=stage, lora=lora, precision="bf16")
    seen: list[int] = []
    for _ in range(3):
        for _ in range(2):
            with actor.hybrid.generating():
                pass
            seen.append(actor.hybrid.weights_hash)
        actor.learn()
    return seen


@pytest.mark.jobs
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "LoRA"])
def test_the_hash_is_that_of_the_weights_now_however_they_are_divided(
    lora: LoraConfig | None, tmp_path: Path
) -> None:
    path = saved(tiny_causal_lm("llama").bfloat16(), tmp_path)
    untrained = weights_hash(
        load_causal_lm(TrainedModelConfig(path=path, precision="bf16"), device=CPU)
    )
    ways = [run_ranks(hashes, path, tp, stage, lora) for tp, stage in ((1, 0), (2, 1), (2, 3))]

    first = ways[0][0]

    assert all(each == first for way in ways for each in way)
    assert first[0] == untrained
    assert [first[index] == first[index + 1] for index in (0, 2, 4)] == [True] * 3
    assert len(set(first)) == 3


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_hash_is_that_of_the_model_as_it_is_exported(
    llama: str, precision: Precision, lora: LoraConfig | None, tmp_path: Path
) -> None:
    actor = Actor(llama, lora=lora, precision=precision)
    actor.relearn()
    with actor.hybrid.generating():
        pass
    export(actor.model, build_tokenizer(), tmp_path, weights=actor.engine)

    exported = FrozenModelConfig(path=str(tmp_path), precision=precision)

    assert actor.hybrid.weights_hash == weights_hash(load_causal_lm(exported, device=CPU))


def test_one_changed_bit_changes_the_hash() -> None:
    model = nn.Linear(3, 5)
    before = weights_hash(model)

    for bit in (0, 15, 31):
        with torch.no_grad():
            bits = model.weight.view(torch.int32)
            bits[2, 1] ^= 1 << bit if bit < 31 else -(2**31)
            assert weights_hash(model) != before
            bits[2, 1] ^= 1 << bit if bit < 31 else -(2**31)

    assert weights_hash(model) == before


def test_parts_of_odd_width_add_up_to_the_hash_of_the_whole() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(5, 7).to(dtype)
        parts = whole.split([1, 4, 2], dim=1)
        starts = (0, 1, 5)

        added = sum(
            bits_sum(part, first=start).item() for part, start in zip(parts, starts, strict=True)
        )

        assert (added - bits_sum(whole).item()) % 2**64 == 0
        assert sum(bits_sum(row).item() for row in whole) % 2**64 == added % 2**64
    assert bits_sum(torch.tensor(1.0)).item() == 0x3F800000
