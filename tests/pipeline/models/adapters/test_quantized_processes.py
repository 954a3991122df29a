"""A base in 4 or 8 bits gives the same bits on several processes."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.config.model import ZeroConfig
from tests.distributed import run_ranks
from tests.pipeline.models.adapters.quantized_models import (
    QUANTIZATIONS,
    get_layers,
    save_base,
    settings,
    train,
)


def get_trained_weights(path: str) -> dict[str, Tensor]:
    """Return adapters and dequantized weights, by quantization, stage and name."""
    results: dict[str, Tensor] = {}
    for (number, quantization), stage in product(enumerate(QUANTIZATIONS), (0, 3)):
        deterministic = ZeroConfig(reduction="deterministic")
        model, engine = train(
            settings(path, zero_stage=stage, zero=deterministic, **quantization), steps=2
        )
        with engine.gathered():
            weights = {key: param for key, param in model.named_parameters() if "lora_" in key}
            weights |= {key: layer.dequantize() for key, layer in get_layers(model).items()}
            results |= {f"{number} {stage} {key}": x.clone() for key, x in weights.items()}
    return results


@pytest.mark.jobs
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.grid)])
def test_two_processes_at_any_stage_match_one_at_stage_0(family: str, tmp_path: Path) -> None:
    path = save_base(family, tmp_path)
    expected = get_trained_weights(path)

    for got in run_ranks(get_trained_weights, path):
        assert got.keys() == expected.keys()
        for key, weight in got.items():
            quantization, _, name = key.split(" ")
            assert torch.equal(weight, expected[key]), key
            assert torch.equal(weight, expected[f"{quantization} 0 {name}"]), key
