"""Models filled from pieces of files equal what `from_pretrained` loads."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from pipeline.files.weight_files import WeightFiles
from pipeline.models.deferred import StoredWeights, find_weights, meta_model
from tests.families import FAMILIES, PECULIAR, saved, tiny_causal_lm

IDS = torch.tensor([[5, 6, 7, 8, 9]])
ALL = [*FAMILIES, *PECULIAR]


def empty(auto: Any, path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a directory's config, without weights."""
    config = AutoConfig.from_pretrained(path, num_labels=1)
    return meta_model(lambda: auto.from_config(config, dtype=dtype))


def loaded(auto: Any, path: str, dtype: torch.dtype = torch.float32) -> tuple[Any, set[str]]:
    """Load a directory by `from_pretrained`; return the model and the missing names."""
    settings = {"num_labels": 1} if auto is AutoModelForSequenceClassification else {}
    model, info = auto.from_pretrained(path, dtype=dtype, output_loading_info=True, **settings)
    return model, set(info["missing_keys"])


def fill(model: PreTrainedModel, weights: StoredWeights, files: WeightFiles) -> None:
    """Give the model its weights, each in three pieces."""
    own, filled = model.state_dict(), {}
    for name, stored in weights.names.items():
        numel = own[name].numel()
        cuts = [0, numel // 3, numel - numel // 5, numel]
        pieces = [
            files.slice(stored, start, stop, dtype=own[name].dtype)
            for start, stop in pairwise(cuts)
        ]
        filled[name] = torch.cat(pieces).view(own[name].shape)
    model.load_state_dict(filled, strict=False, assign=True)
    model.tie_weights()
    model.eval()


def assert_equal(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Parameters and buffers, their number formats and their names are the same."""
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(model, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_a_language_model_filled_from_pieces_is_the_one_from_pretrained_loads(
    family: str, tmp_path: Path
) -> None:
    path = saved(tiny_causal_lm(family), tmp_path)
    expected, missing = loaded(AutoModelForCausalLM, path)
    model, files = empty(AutoModelForCausalLM, path), WeightFiles(path)
    assert {param.device.type for param in model.parameters()} == {"meta"}

    weights = find_weights(model, files)

    assert (set(weights.missing), weights.needs_conversion) == (missing, False)
    fill(model, weights, files)
    assert_equal(model, expected)
    assert torch.equal(model(input_ids=IDS).logits, expected(input_ids=IDS).logits)
