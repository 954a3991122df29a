"""Exports at the end of a step are compared with the trained model in plain `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import LoraConfig, ParallelConfig, TrainedModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.models.forward.forward import Policy, Scorer, base_model
from pipeline.models.passes import make_passes
from pipeline.models.trained import trained_causal_lm, trained_classifier
from pipeline.parallel.mesh import current_mesh
from pipeline.run.exporting import export_verified
from pipeline.system.errors import ModelError
from tests.families import saved, tiny_causal_lm, tiny_classifier

LORA = {"lora": LoraConfig(rank=2, targets=("embed_tokens", "q_proj"))}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("task", ["causal", "classifier"])
def test_an_export_that_differs_from_the_trained_model_is_an_error(
    task: str, precision: Any, tmp_path: Path
) -> None:
    is_lm, start = task == "causal", tmp_path / "start"
    make, trained = (
        (tiny_causal_lm, trained_causal_lm) if is_lm else (tiny_classifier, trained_classifier)
    )
    config = TrainedModelConfig(
        path=saved(make("llama", vocab_size=1280, tie_word_embeddings=True), start),
        precision=precision,
        **LORA,
    )
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = trained(config, tokenizer, device=torch.device("cpu"), seed=0)
    whole = Policy if is_lm else Scorer
    passes = make_passes(
        model, config, ParallelConfig(), current_mesh(), whole, total_steps=1, name="model"
    )

    export_verified(passes, model, tokenizer, tmp_path / "out")
    last: Any = base_model(model).base_model
    last.norm.register_forward_hook(lambda _, __, hidden: 2 * hidden)  # not in the export

    with pytest.raises(ModelError, match="has other"):
        export_verified(passes, model, tokenizer, tmp_path / "out")
