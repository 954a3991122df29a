"""Exports at the end of a step are compared with the trained model in plain `transformers`."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.config import ParallelConfig, Precision, TrainedModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.models.forward.forward import Policy, Scorer, base_model
from pipeline.models.passes import Passes, make_passes
from pipeline.models.trained import prepare_causal_lm, prepare_classifier
from pipeline.parallel.mesh import current_mesh
from pipeline.run.exporting import export_verified
from pipeline.system.errors import ModelError
from tests.families import save_to, tiny_causal_lm, tiny_classifier
from tests.pipeline.models.hf.test_remote_code import model_with_code

__all__ = ["model_with_code"]  # a fixture

MAKE = {
    "log-probabilities": (tiny_causal_lm, prepare_causal_lm, Policy),
    "scores": (tiny_classifier, prepare_classifier, Scorer),
}


def run_export(config: TrainedModelConfig, kind: str, out: Path) -> tuple[Passes, nn.Module]:
    """Export and verify a model of an engine."""
    _, trained, wrap = MAKE[kind]
    model = trained(config, build_tokenizer(), device=torch.device("cpu"), seed=0)
    mesh, parallel = current_mesh(), ParallelConfig()
    passes = make_passes(model, config, parallel, mesh, wrap, total_steps=1, name="it")
    export_verified(passes, model, build_tokenizer(), out)
    return passes, model


@pytest.mark.usefixtures("model_with_code")
def test_model_with_custom_code_is_exported(tmp_path: Path) -> None:
    config = TrainedModelConfig(path=str(tmp_path / "model"), trust_remote_code=True)
    run_export(config, "log-probabilities", tmp_path / "out")
    assert (tmp_path / "out" / "custom.py").is_file()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", MAKE)
def test_export_that_differs_raises(kind: str, precision: Precision, tmp_path: Path) -> None:
    path = save_to(MAKE[kind][0]("llama", vocab_size=1280), tmp_path / "start")
    config = TrainedModelConfig(path=path, precision=precision)

    passes, model = run_export(config, kind, tmp_path / "out")
    norm = base_model(model).get_submodule("model.norm")
    norm.register_forward_hook(lambda _, __, hidden: 2 * hidden)  # the export lacks the hook

    with pytest.raises(ModelError, match=f"gives different {kind}"):
        export_verified(passes, model, build_tokenizer(), tmp_path / "out")
