"""Masters split into bf16 weights and 16 bits train as whole ones do, in half the memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import TrainedModelConfig
from pipeline.config.model import OffloadConfig, ZeroConfig
from pipeline.engine.engine import Engine
from tests.pipeline.engine.test_kernels import settings, trained
from tests.pipeline.engine.test_stages import DTYPES, build, compute_loss


def kinds(engine: Engine) -> set[str]:
    return {group.masters.kind for group in engine.groups}


def make_engine(stage: int, kernels: str = "auto", dtype: str = "bf16", **zero: Any) -> Engine:
    return Engine(build("llama", dtype), settings(stage, kernels, **zero), total_steps=3)


@pytest.mark.parametrize("stage", range(4))
def test_bf16_weights_are_half_of_their_masters_at_every_stage(stage: int) -> None:
    engine = make_engine(stage)

    assert kinds(engine) == {"split"}
    for group in engine.groups:
        (low_bits,) = group.masters.beside()
        assert low_bits.dtype == torch.int16
        assert low_bits.nbytes == 2 * group.masters.numel
        assert group.masters.vector.numel() == 0


@pytest.mark.parametrize("offload", [{"optimizer": "nvme"}, {"params": "nvme"}])
def test_offload_to_a_disk_has_whole_masters_with_the_same_bits(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    places = OffloadConfig(**offload, nvme_path=tmp_path)

    assert kinds(make_engine(3, offload=places)) == {"whole"}
    here, there = trained(3, "auto", "bf16"), trained(3, "auto", "bf16", offload=places)
    assert all(map(torch.equal, here, there))


def test_weights_on_a_disk_leave_memory_after_their_use(tmp_path: Path) -> None:
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


PLACES: dict[str, dict[str, Any]] = {
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
"""Masters half way between two weights, as bits, and the weights: fp16 is rounded to even."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", TIES)
def test_a_master_half_way_between_two_weights_is_rounded_alike_everywhere(
    dtype: str, place: str, tmp_path: Path
) -> None:
    changes = dict(PLACES[place])
    offload = OffloadConfig(**changes.pop("offload", {}), nvme_path=tmp_path)
    model = Row(DTYPES[dtype])
    config = TrainedModelConfig(zero_stage=3, zero=ZeroConfig(offload=offload), **changes)
    engine = Engine(model, config, total_steps=2)
    bits, expected = TIES[dtype]
    masters = torch.tensor(bits).int().view(torch.float32)

    seen = []
    rest = engine.groups[0].masters.numel - len(masters)
    engine.load_masters([torch.cat([masters, torch.zeros(rest)])])
    for _ in range(2):
        with engine.gathered():
            seen.append(tuple(model.weight.tolist()[:3]))
        engine.backward(engine())
        assert not engine.step().skipped

    assert seen == [expected, expected]
    assert torch.equal(next(iter(engine.masters()))[:3], masters)
