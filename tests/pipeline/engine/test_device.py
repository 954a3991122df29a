"""The engine in one process, on a GPU if there is one.

Unlike in `test_stages.py`, the reference is the engine itself at stage 0, because kernels of a GPU
round differently from those of the CPU.
"""

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.config import TrainedModelConfig
from pipeline.config.model import OffloadConfig
from pipeline.engine.engine import Engine
from pipeline.parallel.device import local_device
from tests.families import VOCAB, tiny_causal_lm
from tests.pipeline.engine.test_stages import settings

STEPS = 3
MICRO_BATCHES = 2


def configure(stage: int, *, reduction: str = "fast", **offload: Any) -> TrainedModelConfig:
    offload_config = OffloadConfig(**offload)
    return settings(stage, max_norm=1.0, offload=offload_config, reduction=reduction)


def train(config: TrainedModelConfig, dtype: torch.dtype) -> tuple[Engine, dict[str, torch.Tensor]]:
    device = local_device()
    # On a GPU, the backward pass of fused attention is not deterministic.
    model = tiny_causal_lm("opt", dropout=0.0, attn_implementation="eager")
    model.train().to(device=device, dtype=dtype)
    engine = Engine(model, config, total_steps=STEPS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            ids = torch.randint(0, VOCAB, (2, 9), generator=generator).to(device)
            logits = engine(input_ids=ids, use_cache=False).logits[:, :-1].float().flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
            engine.backward(loss / MICRO_BATCHES)
        assert not engine.step().skipped
    with engine.gathered():
        weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return engine, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"gradients": "cpu"}),
        (3, {"gradients": "cpu"}),
        (3, {"params": "cpu"}),
        (3, {"params": "cpu", "gradients": "cpu"}),
    ],
)
def test_every_stage_and_offload_matches_stage_0_bitwise(
    stage: int, offload: dict[str, Any], dtype: torch.dtype
) -> None:
    _, expected = train(configure(0), dtype)

    _, actual = train(configure(stage, **offload), dtype)

    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize(("stage", "offload"), [(0, {}), (3, {}), (2, {"gradients": "cpu"})])
def test_backward_pass_never_waits_on_the_host(stage: int, offload: dict[str, str]) -> None:
    model = tiny_causal_lm("opt", dropout=0.0, attn_implementation="eager")
    model.train().to(device=local_device(), dtype=torch.bfloat16)
    engine = Engine(model, configure(stage, **offload), total_steps=STEPS)
    hidden = torch.randn(2, 9, model.config.hidden_size, device=local_device())
    for step in range(2):  # the first step allocates the buffers
        for _ in range(MICRO_BATCHES):
            logits = engine(inputs_embeds=hidden.bfloat16(), use_cache=False).logits
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                engine.backward(logits.float().square().mean())
            finally:
                torch.cuda.set_sync_debug_mode("default")
        engine.step()
