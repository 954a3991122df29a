"""Masters that are split into bf16 weights and 16 more bits train like fp32 masters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import TrainedModelConfig
from pipeline.config.model import OffloadConfig, ZeroConfig
from pipeline.engine.engine import Engine
from tests.pipeline.engine.test_kernels import train
from tests.pipeline.engine.test_stages import DTYPES, build, compute_loss, settings


def get_kinds(engine: Engine) -> set[str]:
    return {group.masters.kind for group in engine.groups}


def make_engine(stage: int, **zero: Any) -> Engine:
    return Engine(build("llama", "bf16"), settings(stage, max_norm=0.5, **zero), total_steps=3)


@pytest.mark.parametrize("stage", range(4))
def test_split_masters_store_16_more_bits_at_every_stage(stage: int) -> None:
    engine = make_engine(stage)

    assert get_kinds(engine) == {"split"}
    for group in engine.groups:
        (low_bits,) = group.masters.separate_tensors()
        assert low_bits.dtype == torch.int16
        assert low_bits.nbytes == 2 * group.masters.numel
        assert group.masters.vector.numel() == 0


@pytest.mark.parametrize("offload", [{"optimizer": "nvme"}, {"params": "nvme"}])
def test_offload_to_disk_uses_fp32_masters_with_the_same_bits(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    offload_config = OffloadConfig(**offload, nvme_path=tmp_path)

    assert get_kinds(make_engine(3, offload=offload_config)) == {"separate"}
    in_memory, on_disk = train(3, "auto", "bf16"), train(3, "auto", "bf16", offload=offload_config)
    assert all(map(torch.equal, in_memory, on_disk))


def test_weights_on_disk_are_freed_after_use(tmp_path: Path) -> None:
    engine = make_engine(3, offload=OffloadConfig(params="nvme", nvme_path=tmp_path))

    engine.backward(compute_loss(engine, 0, 0, 0))

    disks = [flat.disk for unit in engine.zero.units for flat in unit.flats]
    assert [disk is not None and disk._buffer is None for disk in disks] == [True] * len(disks)


class Row(nn.Module):
    """Weights without decay, whose gradient is zero."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self) -> Tensor:
        return 0 * self.weight.float().sum()


OFFLOADS: dict[str, dict[str, Any]] = {
    "split, by a kernel": {},
    "split, by PyTorch": {"kernels": "off"},
    "everything in main memory": {
        "offload": {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"}
    },
    "everything on a disk": {"offload": {"optimizer": "nvme", "params": "nvme"}},
    "masters on a disk": {"offload": {"optimizer": "nvme"}},
    "weights on a disk": {"offload": {"params": "nvme"}},
}

TIES = {
    "bf16": ((0x3F808000, 0x3F818000, 0xBF808000), (1 + 2**-7, 1 + 2**-6, -1 - 2**-7)),
    "fp16": ((0x3F801000, 0x3F803000, 0xBF801000), (1.0, 1 + 2**-9, -1.0)),
}
"""Bits of masters that are ties between two weights, and the weights; fp16 rounds to even."""


@pytest.mark.parametrize("case", OFFLOADS)
@pytest.mark.parametrize("dtype", TIES)
def test_ties_are_rounded_alike_by_every_implementation(
    dtype: str, case: str, tmp_path: Path
) -> None:
    changes = dict(OFFLOADS[case])
    offload = OffloadConfig(**changes.pop("offload", {}), nvme_path=tmp_path)
    model = Row(DTYPES[dtype])
    config = TrainedModelConfig(zero_stage=3, zero=ZeroConfig(offload=offload), **changes)
    engine = Engine(model, config, total_steps=2)
    bits, expected = TIES[dtype]
    masters = torch.tensor(bits).int().view(torch.float32)

    weights = []
    num_padding = engine.groups[0].masters.numel - len(masters)
    engine.load_masters([torch.cat([masters, torch.zeros(num_padding)])])
    for _ in range(2):
        with engine.gathered():
            weights.append(tuple(model.weight.tolist()[:3]))
        engine.backward(engine())
        assert not engine.step().skipped

    assert weights == [expected, expected]
    assert torch.equal(next(iter(engine.masters()))[:3], masters)
