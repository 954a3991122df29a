"""AdamW in pieces on states in host memory; the CPU takes the place of a GPU."""

import pytest
import torch
from torch import Tensor

from pipeline.config import Kernels
from pipeline.engine.optimizer.host_adamw import HostAdamW
from pipeline.kernels.adamw import AdamW, FlatAdamW, Shard, Weights
from tests.operators import OperatorRecorder

STEPS = [
    AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=number, multiplier=0.5)
    for number in (1, 2, 3)
]


def make_shards(copy: torch.dtype | None) -> list[Shard]:
    """Return vectors of seven pieces of 64 and of less than one, the latter without decay."""
    generator = torch.Generator().manual_seed(0)
    shards: list[Shard] = []
    for numel, decay in ((400, 0.1), (48, 0.0)):
        master, gradient = torch.randn(2, numel, generator=generator)
        weight_copy = None if copy is None else torch.zeros(numel, dtype=copy)
        weights = Weights(master, *torch.zeros(2, numel), copy=weight_copy)
        shards.append(Shard(weights=weights, gradient=gradient, lr=2.0, weight_decay=decay))
    return shards


def get_tensors(shards: list[Shard]) -> list[Tensor]:
    return [tensor for shard in shards for tensor in shard.weights.tensors().values()]


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("copy", [torch.bfloat16, torch.float16, None])
def test_step_in_pieces_matches_a_full_step(copy: torch.dtype | None, kernels: Kernels) -> None:
    expected, actual = make_shards(copy), make_shards(copy)
    host_adamw = HostAdamW(torch.device("cpu"), chunk=64)

    for step in STEPS:
        FlatAdamW().step(expected, step, kernels=kernels)
        host_adamw.step(actual, step, kernels=kernels)

    assert all(map(torch.equal, get_tensors(actual), get_tensors(expected)))


@pytest.mark.parametrize(("device", "operators"), [("cpu", {"copy_"}), ("meta", set[str]())])
def test_later_steps_only_copy_tensors_of_the_device(device: str, operators: set[str]) -> None:
    shards = make_shards(torch.bfloat16)
    host_adamw = HostAdamW(torch.device(device), chunk=64)
    host_adamw.step(shards, STEPS[0], kernels="required")

    with OperatorRecorder(numel=1) as recorder:
        host_adamw.step(shards, STEPS[1], kernels="required")

    assert set(recorder.names) == operators
