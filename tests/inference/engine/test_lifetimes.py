"""Generation frees its memory when it ends, without the cyclic garbage collector."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inference.engine import cache
from inference.generation import generate
from pipeline.config import FrozenModelConfig
from pipeline.models.hf.load import load_causal_lm
from tests.families import save_to, tiny_causal_lm


@pytest.mark.jobs
@pytest.mark.usefixtures("gc_disabled")
def test_keys_and_values_are_freed_after_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_to(tiny_causal_lm("llama"), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))
    references: list[weakref.ref[Tensor]] = []
    new_zeros = cache.new_zeros

    def track(like: Tensor, *shape: int) -> Tensor:
        stored = new_zeros(like, *shape)
        references.append(weakref.ref(stored))
        return stored

    monkeypatch.setattr(cache, "new_zeros", track)
    responses = generate(  # enough tokens for passes from a trace
        model, [[5, 6], [7]], max_new_tokens=9, temperature=0.0, stop_ids=[], seed=0
    )

    assert [len(response.ids) for response in responses] == [9, 9]
    assert len(references) == 2 * model.config.num_hidden_layers
    assert not any(stored() is not None for stored in references)
