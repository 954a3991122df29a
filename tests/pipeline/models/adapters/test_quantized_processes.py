"""A base in 4 or 8 bits on several processes: the same bits, and the bytes of the plan."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.config.model import ZeroConfig
from tests.distributed import run_ranks
from tests.pipeline.models.adapters.quantized_models import (
    WAYS,
    base,
    get_layers,
    learned,
    settings,
)


def ends(path: str) -> dict[str, Tensor]:
    """The adapters, and what is dequantized, by way, stage and name."""
    found: dict[str, Tensor] = {}
    for (number, way), stage in product(enumerate(WAYS), (0, 3)):
        deterministic = ZeroConfig(reduction="deterministic")
        model, engine = learned(
            settings(path, zero_stage=stage, zero=deterministic, **way), steps=2
        )
        with engine.gathered():
            weights = {key: param for key, param in model.named_parameters() if "lora_" in key}
            weights |= {key: layer.dequantized() for key, layer in get_layers(model).items()}
            found |= {f"{number} {stage} {key}": each.clone() for key, each in weights.items()}
    return found


@pytest.mark.jobs
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.grid)])
def test_two_processes_have_at_every_stage_what_one_has_at_stage_0(
    family: str, tmp_path: Path
) -> None:
    path = base(family, tmp_path)
    alone = ends(path)

    for got in run_ranks(ends, path):
        assert got.keys() == alone.keys()
        for key, weight in got.items():
            way, _, name = key.split(" ")
            assert torch.equal(weight, alone[key]), key
            assert torch.equal(weight, alone[f"{way} 0 {name}"]), key
