"""The check at the start of step 3 finds an engine that reads the wrong keys."""

from pathlib import Path

import pytest
import torch

from inference.engine.cache import SlotCache
from inference.generation import GenerationMismatchError, check_generation
from pipeline.config import FrozenModelConfig, Precision
from pipeline.models.load import load_causal_lm
from tests.families import FAMILIES, random_rows, saved, tiny_causal_lm

PROMPTS = [row.input_ids for row in random_rows((7, 12))]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(family: str, precision: Precision, tmp_path: Path) -> None:
    path = saved(tiny_causal_lm(family), tmp_path)
    config = FrozenModelConfig(path=path, precision=precision)

    check_generation(load_causal_lm(config, device=torch.device("cpu")), PROMPTS)


def test_a_cache_that_loses_a_token_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tiny_causal_lm("llama"), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))
    copy = SlotCache.copy
    monkeypatch.setattr(
        SlotCache, "copy", lambda self, source, to, length: copy(self, source, to, length - 1)
    )

    with pytest.raises(GenerationMismatchError, match=r"llama in torch.float32 chose a token"):
        check_generation(model, [PROMPTS[0], PROMPTS[0], PROMPTS[1]])
