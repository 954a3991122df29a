"""The norm's bits depend on the numbers alone; the loss scale follows DeepSpeed 0.19.8's."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.config import LossScaleConfig
from pipeline.engine.engine import Engine
from pipeline.engine.optimizer.gradients import LossScaler, squared_norms
from pipeline.engine.sharding.tensor_parallel import Part, counted, mark_part
from pipeline.parallel.group import Group
from pipeline.parallel.shards import Shard, ShardSpec
from tests.operators import Operators
from tests.pipeline.engine.test_stages import settings


def scaler(**settings: object) -> LossScaler:
    return LossScaler(enabled=True, config=LossScaleConfig(**settings))


def trajectory(subject: LossScaler, steps: str) -> list[float]:
    """The scale after each step: `x` overflows, `.` is good."""
    scales = []
    for step in steps:
        subject.update(finite=step == ".")
        scales.append(subject.scale)
    return scales


SMALL = {"initial_scale_power": 8, "loss_scale_window": 3}


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        # The second overflow halves, and each one after it; three good steps after a first double.
        (
            SMALL,
            "xxx.........x........xx",
            [256, 128, 64, *[64] * 3, *[128] * 3, *[256] * 7, *[512] * 3, *[1024] * 3, 512],
        ),
        # Good steps alone do not refill the hysteresis: only a doubling does.
        (SMALL, "x.x.x.x....x.x", [256, 256, 128, 128, 64, 64, 32, 32, 32, 32, 64, 64, 64, 32]),
        # Consecutive hysteresis: single overflows never halve, pairs do.
        (
            {**SMALL, "consecutive_hysteresis": True},
            "x.x.x.x....x.xx.xx",
            [*[256] * 10, 512, 512, 512, 512, 256, 256, 256, 128],
        ),
        ({**SMALL, "hysteresis": 1}, "x.x....x", [128, 128, 64, 64, 64, 64, 128, 64]),
        (
            {**SMALL, "hysteresis": 3},
            "xxxx....xxx",
            [256, 256, 128, 64, 64, 64, 64, 128, 128, 128, 64],
        ),
        (
            {"initial_scale_power": 2, "loss_scale_window": 1},
            "....x.x..",
            [4, 8, 16, 32, 32, 32, 16, 16, 32],
        ),
        ({}, "x" * 17, [2**power for power in range(16, -1, -1)]),
    ],
)
def test_the_scale_follows_deepspeeds(
    settings: dict[str, Any], steps: str, expected: list[float]
) -> None:
    assert trajectory(scaler(**settings), steps) == expected


def test_the_scale_stops_at_its_minimum_and_an_overflow_there_exhausts_it() -> None:
    subject = scaler(initial_scale_power=3, min_loss_scale=2.0, loss_scale_window=2, hysteresis=1)

    assert trajectory(subject, "xx...x.x") == [4, 2, 2, 2, 4, 2, 2, 2]
    assert subject.exhausted


def test_a_state_restores_the_search_and_not_a_static_scale() -> None:
    subject, restored = (scaler(initial_scale_power=8, loss_scale_window=3) for _ in range(2))
    trajectory(subject, "xx..")

    restored.load_state_dict(subject.state_dict())
    assert restored.state_dict() == subject.state_dict()
    assert trajectory(restored, "..x") == trajectory(subject, "..x") == [128.0, 256.0, 256.0]
    restored.load_state_dict({**subject.state_dict(), "enabled": False})
    assert (restored.scale, restored.good_steps, restored.tokens) == (256.0, 0, 2)
    static = scaler(loss_scale=64.0)
    static.load_state_dict(subject.state_dict())
    assert trajectory(static, "x") == [64.0]


@pytest.mark.parametrize("rows", [1, 16])
def test_neither_the_number_of_threads_nor_of_rows_changes_a_bit(rows: int) -> None:
    values = torch.randn(rows * 150_000, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            found.append(squared_norms(values, rows).tolist())
    finally:
        torch.set_num_threads(threads)
    one_by_one = [squared_norms(row, 1).item() for row in values.view(rows, -1)]

    assert found == [one_by_one] * 3


def test_the_sum_is_fp64s() -> None:
    values = torch.tensor([1e19, 1.0, 1e-19] * 16)  # whose squares fp32 can't hold

    total = math.fsum(squared_norms(values, 16).tolist())

    exact = [value.item() ** 2 for value in values]
    assert total == pytest.approx(math.fsum(exact), rel=1e-15)


def test_the_norm_of_a_gradient_off_the_cpu_reads_it_once() -> None:
    """`_foreach_norm` has a CUDA kernel that adds fp32 in fp64, where `vector_norm` copies."""
    gradient = torch.empty(2**24, device="meta")

    with Operators(2**20) as operators:
        total = squared_norms(gradient, 16)

    assert (total.shape, total.dtype) == ((16,), torch.float64)
    assert operators.names == ["_foreach_norm"]


class Layers(nn.Module):
    """Three blocks without biases."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("stage", [0, 3])
def test_a_bf16_gradient_moves_ten_bytes_an_element_into_the_sum(stage: int) -> None:
    """Two of the gradient, four of the sum before and four after it; 34 with a zeroed buffer."""
    model = Layers()
    engine = Engine(model, settings(stage, max_norm=None), total_steps=1)
    x = torch.ones(1, 64, dtype=torch.bfloat16)

    for _ in range(3):
        loss = engine(x).float().sum()
        with Operators(64 * 64) as operators:
            engine.backward(loss)
        moved = operators.num_bytes
        total = sum(moved[name] for name in ("zero_", "clone", "_to_copy", "copy_", "add_"))
        assert total == 10 * sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, [1.0] * 9), (1, [1.0] * 2 + [0.0] * 3 + [1.0] * 4)]
)
def test_elements_that_several_processes_have_count_once(rank: int, expected: list[float]) -> None:
    """A vector has elements 2 to 5 of a parameter that both have, at the same positions."""
    specs = tuple(ShardSpec(0, (Shard(0, 8, 2, counts=first),)) for first in (True, False))
    param = torch.nn.Parameter(torch.empty(8))
    mark_part(param, Part(torch.Size([8]), specs, rank))

    gradient = counted(torch.ones(9), "shared", Group(rank, (0, 1)), [(param, 2, slice(2, 5))])

    assert gradient.tolist() == expected
