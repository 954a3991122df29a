"""Gradient norms are deterministic; the loss scale follows DeepSpeed 0.19.8's."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.config import LossScaleConfig
from pipeline.engine.engine import Engine
from pipeline.engine.optimizer.gradients import LossScaler, squared_norms
from pipeline.engine.sharding.tensor_parallel import ParamShard, mark_sharded, mask_duplicates
from pipeline.parallel.group import Group
from pipeline.parallel.shards import Shard, ShardSpec
from tests.memory import live_bytes
from tests.operators import OperatorRecorder
from tests.pipeline.engine.test_stages import settings


def make_scaler(**settings: object) -> LossScaler:
    return LossScaler(enabled=True, config=LossScaleConfig(**settings))


def run_steps(scaler: LossScaler, steps: str) -> list[float]:
    """Return the scale after each step; `x` overflows, `.` doesn't."""
    scales = []
    for step in steps:
        scaler.update(finite=step == ".")
        scales.append(scaler.scale)
    return scales


SMALL = {"initial_scale_power": 8, "loss_scale_window": 3}


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        # The second and later overflows halve the scale; then every three good steps double it.
        (
            SMALL,
            "xxx.........x........xx",
            [256, 128, 64, *[64] * 3, *[128] * 3, *[256] * 7, *[512] * 3, *[1024] * 3, 512],
        ),
        # Good steps alone do not reset the hysteresis: only a doubling does.
        (SMALL, "x.x.x.x....x.x", [256, 256, 128, 128, 64, 64, 32, 32, 32, 32, 64, 64, 64, 32]),
        # Consecutive hysteresis: single overflows never halve, pairs do.
        (
            {**SMALL, "consecutive_hysteresis": True},
            "x.x.x.x....x.xx.xx",
            [*[256] * 10, 512, 512, 512, 512, 256, 256, 256, 128],
        ),
        ({**SMALL, "hysteresis": 3}, "xxxx....xx", [256, 256, 128, *[64] * 4, *[128] * 3]),
        (
            {"initial_scale_power": 2, "loss_scale_window": 1},
            "....x.x..",
            [4, 8, 16, 32, 32, 32, 16, 16, 32],
        ),
        ({}, "x" * 17, [2**power for power in range(16, -1, -1)]),
    ],
)
def test_loss_scale_follows_deepspeed(
    settings: dict[str, Any], steps: str, expected: list[float]
) -> None:
    assert run_steps(make_scaler(**settings), steps) == expected


def test_overflow_at_the_minimum_loss_scale_exhausts_it() -> None:
    scaler = make_scaler(
        initial_scale_power=3, min_loss_scale=2.0, loss_scale_window=2, hysteresis=1
    )

    assert run_steps(scaler, "xx...x.x") == [4, 2, 2, 2, 4, 2, 2, 2]
    assert scaler.is_exhausted


def test_state_restores_a_dynamic_but_not_a_static_loss_scale() -> None:
    scaler, restored = (make_scaler(initial_scale_power=8, loss_scale_window=3) for _ in range(2))
    run_steps(scaler, "xx..")

    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()
    assert run_steps(restored, "..x") == run_steps(scaler, "..x") == [128.0, 256.0, 256.0]
    restored.load_state_dict({**scaler.state_dict(), "enabled": False})
    assert (restored.scale, restored.good_steps, restored.tokens) == (256.0, 0, 2)
    static = make_scaler(loss_scale=64.0)
    static.load_state_dict(scaler.state_dict())
    assert run_steps(static, "xx") == [64.0, 64.0]


@pytest.mark.parametrize("rows", [1, 16])
def test_norms_do_not_depend_on_the_number_of_threads_or_rows(rows: int) -> None:
    values = torch.randn(rows * 150_000, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    norms = []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            norms.append(squared_norms(values, rows).tolist())
    finally:
        torch.set_num_threads(threads)
    one_by_one = [squared_norms(row, 1).item() for row in values.view(rows, -1)]

    assert norms == [one_by_one] * 3


def test_squared_norms_are_summed_in_fp64() -> None:
    values = torch.tensor([1e19, 1.0, 1e-19] * 16)  # whose squares fp32 can't hold

    total = math.fsum(squared_norms(values, 16).tolist())

    exact = [value.item() ** 2 for value in values]
    assert total == pytest.approx(math.fsum(exact), rel=1e-15)


def test_norm_of_a_gpu_gradient_reads_it_once() -> None:
    """The CUDA kernel of `_foreach_norm` sums fp32 in fp64, while `vector_norm` makes a copy."""
    gradient = torch.empty(2**24, device="meta")

    with OperatorRecorder(2**20) as operators:
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
def test_accumulating_a_bf16_gradient_moves_ten_bytes_per_element(stage: int) -> None:
    """Read two of the gradient and four of the sum, and write four; 34 with a zeroed buffer."""
    model = Layers()
    engine = Engine(model, settings(stage, max_norm=None), total_steps=1)
    x = torch.ones(1, 64, dtype=torch.bfloat16)

    for _ in range(3):
        loss = engine(x).float().sum()
        with OperatorRecorder(64 * 64) as operators:
            engine.backward(loss)
        moved = operators.num_bytes
        total = sum(moved[name] for name in ("zero_", "clone", "_to_copy", "copy_", "add_"))
        assert total == 10 * sum(param.numel() for param in model.parameters())


def test_step_frees_the_gradients() -> None:
    engine = Engine(Layers(), settings(0, max_norm=None), total_steps=1)
    before = live_bytes()
    engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum())
    engine.step()

    assert live_bytes() - before < 9 * 3 * 64 * 64  # two moments take 8 bytes per weight


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, [1.0] * 9), (1, [1.0] * 2 + [0.0] * 3 + [1.0] * 4)]
)
def test_elements_on_several_ranks_are_counted_once(rank: int, expected: list[float]) -> None:
    """Elements 2 to 5 of the vector belong to a parameter that both ranks have."""
    specs = tuple(ShardSpec(0, (Shard(0, 8, 2, is_first_copy=first),)) for first in (True, False))
    param = torch.nn.Parameter(torch.empty(8))
    mark_sharded(param, ParamShard(torch.Size([8]), specs, rank))

    ranges, group = [(param, 2, slice(2, 5))], Group(rank, (0, 1))
    gradient = mask_duplicates(torch.ones(9), "overlapping", group, ranges)

    assert gradient.tolist() == expected
