"""Settings that must not change a bit: processes, offload, prefetch, transport, backward calls."""

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
    """SHA-256 of all weights."""
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def shared_out(dtype: str, stages: tuple[int, ...], family: str) -> list[tuple[str, list[float]]]:
    """The same eight micro-batches, dealt to the processes one after the other."""

    def loss(engine: nn.Module, step: int, micro_batch: int, of_rank: int) -> Tensor:
        return compute_loss(engine, step, micro_batch * world_size() + of_rank, 0)

    ended: list[tuple[str, list[float]]] = []
    for stage in stages:
        got = train(
            build(family, dtype),
            settings(stage, max_norm=0.5, reduction="deterministic"),
            accumulation=MICRO_BATCHES // world_size(),
            loss=loss,
        )
        ended.append((digest(got.weights), got.norms))
    return ended


REDUCED = [
    # Each family and each dtype once; the others are the grid.
    pytest.param(family, dtype, marks=marks if once else pytest.mark.grid)
    for dtype, once_with, marks in (
        ("fp32", "gpt2", ()),
        ("bf16", "llama", ()),
        ("fp16", "llama", pytest.mark.grid),
    )
    for family in ("llama", "gpt2")
    for once in (family == once_with,)
]


@pytest.mark.parametrize(("family", "dtype"), REDUCED)
def test_deterministic_reduction_gives_1_2_and_4_processes_the_same_bits(
    family: str, dtype: str
) -> None:
    (alone,) = shared_out(dtype, (0,), family)

    for world, stages in ((2, (1, 3)), (4, (0, 2, 3))):
        ended = run_ranks(shared_out, dtype, stages, family, world_size=world)
        assert ended == [[alone] * len(stages)] * world


def half_way(dtype: str, stage: int, **zero: Any) -> tuple[str, str]:
    """Weights whose masters are set half way between two bf16, and after a step that leaves them.

    Training seldom comes to such a master, and a rounding to even would not be seen.
    """
    config = settings(stage, max_norm=None, weight_decay=0.0, **zero)
    engine = Engine(build("llama", dtype), config, total_steps=2)
    bits = ((each.view(torch.int32) & ~0xFFFF) | 0x8000 for each in engine.masters())
    engine.load_masters([each.view(torch.float32) for each in list(bits)])
    seen = []
    for _ in range(2):
        with engine.gathered():
            seen.append(digest(dict(engine.model.named_parameters())))
        engine.backward(0 * compute_loss(engine, 0, 0, rank()))
        engine.step()
    return seen[0], seen[1]


def ways_to_train(ways: dict[int, dict[str, dict[str, Any]]], dtype: str) -> list[str]:
    """Return the settings, by stage, whose final weights differ from those of plain stage 2."""
    plain = train(build("llama", dtype), settings(2, max_norm=0.5), accumulation=2)
    ties = half_way(dtype, 2)
    assert ties[0] == ties[1]
    wrong: list[str] = []
    for stage, name, zero in ((at, *way) for at in ways for way in ways[at].items()):
        got = train(build("llama", dtype), settings(stage, max_norm=0.5, **zero), accumulation=2)
        if digest(got.weights) != digest(plain.weights) or got.norms != plain.norms:
            wrong.append(f"stage {stage}, {name}")
        if half_way(dtype, stage, **zero) != ties:
            wrong.append(f"stage {stage}, {name}, half way between two weights")
    return wrong


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "through the process group": {"shared_memory": False},
    "optimizer offloaded": {"offload": OffloadConfig(optimizer="cpu")},
    "gradients offloaded": {"offload": OffloadConfig(gradients="cpu")},
    "optimizer and gradients offloaded": {
        "offload": OffloadConfig(optimizer="cpu", gradients="cpu")
    },
}
NVME = OffloadConfig(optimizer="nvme", nvme_path=Path(tempfile.gettempdir()))
WAYS["optimizer on a disk"] = {"offload": NVME}
AT_STAGE_3: dict[str, dict[str, Any]] = {
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
def test_stages_transports_and_offload_agree_on_any_number_of_processes(
    world: int, dtype: str
) -> None:
    ways = {0: WAYS, 3: WAYS | AT_STAGE_3}
    if world > 2:  # four processes on two cores are slow: the stages, and the two transports
        transports = {name: WAYS[name] for name in ("plain", "through the process group")}
        ways = dict.fromkeys(range(4), transports)

    assert run_ranks(ways_to_train, ways, dtype, world_size=world) == [[]] * world


def all_adapters() -> list[tuple[str, int]]:
    return [adapters(stage) for stage in range(4)]


def adapters(stage: int) -> tuple[str, int]:
    """Weights after training, and bytes of moments; the frozen ones are as before."""
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
    moments = sum(
        each.nbytes for group in engine.groups for each in group.state.values() if each.numel() > 1
    )
    return digest(weights), moments


@pytest.mark.jobs
def test_adapters_agree_at_every_stage_and_the_base_has_no_state_and_never_changes() -> None:
    ended = run_ranks(all_adapters)

    assert len({weights for ranks in ended for weights, _ in ranks}) == 1
    # 928 elements of A and B in each of two blocks, padded to 1,024; two moments of 4 bytes.
    whole = 2 * 1024 * 2 * 4
    at_stage_0, *others = [
        [num_bytes for _, num_bytes in ranks] for ranks in zip(*ended, strict=True)
    ]
    assert at_stage_0 == [whole, whole]
    assert [sum(of_ranks) for of_ranks in others] == [whole] * 3
