"""A model consolidated from a checkpoint equals the one that the run exports."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config import TrainedModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.state import trained_fragments
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.engine import Engine
from pipeline.models.hf.consolidate import TOKENIZER, consolidate, describe_model
from tests.every_family import tiny_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_between_two_weights_are_rounded_as_in_training(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model("deepseek_v3")
    for buffer in model.buffers():  # including the bias of its router
        buffer.add_(0.5)
    torch.nn.Module.to(model, dtype)
    engine = Engine(model, TrainedModelConfig(), total_steps=1)
    half = 0x8000 if dtype == torch.bfloat16 else 0x1000
    engine.load_masters(
        [(master.view(torch.int32) | half).view(torch.float32) for master in engine.masters()]
    )
    writer = CheckpointWriter(tmp_path, job="test", rank=0, world_size=1)
    writer.save(1, trained_fragments(engine, "model"), {"models": {"model": describe_model(model)}})
    writer.wait()
    build_tokenizer().save_pretrained(tmp_path / TOKENIZER)

    consolidate(Checkpoint.open(tmp_path / "step_00000001"), "model", tmp_path / "out")

    consolidated = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(consolidated[name], weight), name
