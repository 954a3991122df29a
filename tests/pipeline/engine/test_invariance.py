"""Settings that must not change a bit of the result: processes, stages, offload."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import LoraConfig, TrainedModelConfig
from pipeline.config.model import OffloadConfig
from pipeline.engine.engine import Engine
from pipeline.models.adapters.lora import add_lora
from tests.distributed import rank, run_ranks, world_size
from tests.pipeline.engine.test_stages import STEPS, build, compute_loss, settings, train

MICRO_BATCHES = 8


def digest(weights: dict[str, Tensor]) -> str:
    """Return the SHA-256 of all weights."""
    sha256 = hashlib.sha256()
    for name in sorted(weights):
        sha256.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def train_batch(dtype: str, stages: tuple[int, ...], family: str) -> list[tuple[str, list[float]]]:
    """Train on eight micro-batches, which are distributed over the processes in turn."""

    def loss(engine: nn.Module, step: int, micro_batch: int, rank_index: int) -> Tensor:
        return compute_loss(engine, step, micro_batch * world_size() + rank_index, 0)

    results: list[tuple[str, list[float]]] = []
    for stage in stages:
        result = train(
            build(family, dtype),
            settings(stage, max_norm=0.5, reduction="deterministic"),
            accumulation=MICRO_BATCHES // world_size(),
            loss=loss,
        )
        results.append((digest(result.weights), result.norms))
    return results


DETERMINISTIC_CASES = [
    # Each family and each dtype once; the other pairs belong to the grid.
    pytest.param(family, dtype, marks=marks if is_default else pytest.mark.grid)
    for dtype, default_family, marks in (
        ("fp32", "gpt2", ()),
        ("bf16", "llama", ()),
        ("fp16", "llama", pytest.mark.grid),
    )
    for family in ("llama", "gpt2")
    for is_default in (family == default_family,)
]


@pytest.mark.parametrize(("family", "dtype"), DETERMINISTIC_CASES)
def test_deterministic_reduction_matches_bitwise_on_1_2_and_4_ranks(
    family: str, dtype: str
) -> None:
    (expected,) = train_batch(dtype, (0,), family)

    for world, stages in ((2, (1, 3)), (4, (0, 2, 3))):
        results = run_ranks(train_batch, dtype, stages, family, world_size=world)
        assert results == [[expected] * len(stages)] * world


def digest_ties(dtype: str, stage: int, **zero: Any) -> tuple[str, str]:
    """Return digests of weights whose masters are ties between two bf16, around a no-op step."""
    config = settings(stage, max_norm=None, weight_decay=0.0, **zero)
    engine = Engine(build("llama", dtype), config, total_steps=2)
    bits = [(master.view(torch.int32) & ~0xFFFF) | 0x8000 for master in engine.masters()]
    engine.load_masters([tie.view(torch.float32) for tie in bits])
    digests = []
    for _ in range(2):
        with engine.gathered():
            digests.append(digest(dict(engine.model.named_parameters())))
        engine.backward(0 * compute_loss(engine, 0, 0, rank()))
        engine.step()
    return digests[0], digests[1]


def find_differences(cases: dict[int, dict[str, dict[str, Any]]], dtype: str) -> list[str]:
    """Return the settings, by stage, whose final weights differ from those of plain stage 2."""
    plain = train(build("llama", dtype), settings(2, max_norm=0.5), accumulation=2)
    ties = digest_ties(dtype, 2)
    assert ties[0] == ties[1]
    failed: list[str] = []
    for stage, name, zero in ((key, *case) for key in cases for case in cases[key].items()):
        result = train(build("llama", dtype), settings(stage, max_norm=0.5, **zero), accumulation=2)
        if digest(result.weights) != digest(plain.weights) or result.norms != plain.norms:
            failed.append(f"stage {stage}, {name}")
        if digest_ties(dtype, stage, **zero) != ties:
            failed.append(f"stage {stage}, {name}, ties")
    return failed


ZERO_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "optimizer offloaded": {"offload": OffloadConfig(optimizer="cpu")},
    "gradients offloaded": {"offload": OffloadConfig(gradients="cpu")},
    "optimizer and gradients offloaded": {
        "offload": OffloadConfig(optimizer="cpu", gradients="cpu")
    },
}
NVME = OffloadConfig(optimizer="nvme", nvme_path=Path(tempfile.gettempdir()))
ZERO_SETTINGS["optimizer on a disk"] = {"offload": NVME}
STAGE_3_SETTINGS: dict[str, dict[str, Any]] = {
    "weights offloaded": {"offload": OffloadConfig(params="cpu")},
    "weights on a disk": {"offload": OffloadConfig(params="nvme", nvme_path=NVME.nvme_path)},
    "weights and optimizer on a disk": {
        "offload": OffloadConfig(params="nvme", optimizer="nvme", nvme_path=NVME.nvme_path)
    },
    "everything offloaded": {
        "offload": OffloadConfig(optimizer="cpu", gradients="cpu", params="cpu")
    },
}


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (2, "bf16"),
        *(
            pytest.param(world, dtype, marks=pytest.mark.grid)
            for world, dtype in ((2, "fp32"), (3, "bf16"), (4, "fp32"), (4, "bf16"))
        ),
    ],
)
def test_stages_and_offload_agree_bitwise(world: int, dtype: str) -> None:
    cases = {0: ZERO_SETTINGS, 3: ZERO_SETTINGS | STAGE_3_SETTINGS}
    if world > 2:  # four processes on two cores are slow
        cases = {stage: {"plain": ZERO_SETTINGS["plain"]} for stage in range(4)}

    assert run_ranks(find_differences, cases, dtype, world_size=world) == [[]] * world


def train_adapters_at_every_stage() -> list[tuple[str, int]]:
    return [train_adapters(stage) for stage in range(4)]


def train_adapters(stage: int) -> tuple[str, int]:
    """Check that frozen weights don't change; return the weights' digest and the moments' bytes."""
    model = add_lora(build("llama", "bf16"), LoraConfig(rank=2), task="causal", seed=0)
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    before = digest({name: dict(model.named_parameters())[name].clone() for name in frozen})
    config = TrainedModelConfig(zero_stage=stage)
    engine = Engine(model, config, total_steps=STEPS)
    for step in range(STEPS):
        engine.backward(compute_loss(engine, step, 0, rank()))
        engine.step()
    with engine.gathered():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert digest({name: weights[name] for name in frozen}) == before
    moments = [x for group in engine.groups for x in group.named_moments().values()]
    return digest(weights), sum(x.nbytes for x in moments)


@pytest.mark.jobs
def test_adapters_agree_at_every_stage_and_frozen_weights_have_no_state() -> None:
    results = run_ranks(train_adapters_at_every_stage)

    assert len({weights for ranks in results for weights, _ in ranks}) == 1
    # 928 elements of A and B in each of two blocks, padded to 1,024; two moments of 4 bytes.
    full = 2 * 1024 * 2 * 4
    at_stage_0, *others = [
        [num_bytes for _, num_bytes in ranks] for ranks in zip(*results, strict=True)
    ]
    assert at_stage_0 == [full, full]
    assert [sum(ranks) for ranks in others] == [full] * 3
