"""Two processes that compute each layer together find the gradients of one, parameter by name."""

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.engine.sharding.tensor_parallel import Part, mark_part
from pipeline.models.parallel.tensor_parallel import _different_gradient
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import cut_mesh
from pipeline.parallel.shards import Shard, ShardSpec
from tests.distributed import run_ranks
from tests.pipeline.models.parallel.parallel_models import VARIANTS, learned

PARTIAL = {"qwen3": {"q_norm", "k_norm"}}
"""Modules with whole weights of whose gradient each process finds a part."""

SHARED = {"llama, one key head": {"k_proj", "v_proj"}}
"""Modules with rows that both processes have."""


ALL, FEW = tuple(VARIANTS), ("opt", "qwen3", "llama, one key head")


def learned_together(names: tuple[str, ...], sequence: bool) -> dict[str, dict[str, Any]]:
    with cut_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
        return {name: learned(*VARIANTS[name], mesh, sequence=sequence) for name in names}


@pytest.mark.parametrize(
    ("names", "sequence"),
    [(ALL, True), (FEW, False), pytest.param(ALL, False, marks=pytest.mark.grid)],
)
def test_two_processes_find_the_gradients_of_one(names: tuple[str, ...], sequence: bool) -> None:
    together, other = run_ranks(learned_together, names, sequence)

    for name in names:
        family, changes = VARIANTS[name]
        alone, found = learned(family, changes), together[name]
        assert found["gradients"].keys() == alone["gradients"].keys()
        noise = 1e-6 * alone["norm"]  # which is all the gradient of keys' biases
        for key, expected in alone["gradients"].items():
            distance = (found["gradients"][key] - expected).norm()
            assert distance <= 1e-5 * expected.norm() + noise, f"{name}: {key}"
        for figure in ("norm", "loss", "logits"):
            assert found[figure] == pytest.approx(alone[figure], rel=1e-5), f"{name}: {figure}"
        partial = PARTIAL.get(name, set())
        assert found["roles"].get("partial", set()) >= partial
        assert sequence or found["roles"].get("partial", set()) == partial
        assert found["roles"].get("shared", set()) == SHARED.get(name, set())
        theirs = other[name]["gradients"]
        assert all(torch.equal(found["gradients"][key], each) for key, each in theirs.items())


@pytest.mark.parametrize(
    ("part", "bias", "differs"),
    [
        ([3.002, 4.002], 3e-6, None),  # a bias whose gradient is rounding of the whole
        ([3.01, 4.01], 1e-5, "part"),
        ([1.0, 2.0], 0.0, "part"),
        ([3.0, 4.0], 1e-5, "bias"),
    ],
)
def test_the_first_parameter_with_another_gradient_is_named(
    part: list[float], bias: float, differs: str | None
) -> None:
    """The second of two processes has the last two of four elements, and the whole bias."""
    whole, sharded = nn.ParameterDict(), nn.ParameterDict()
    gradients = {"part": ([1.0, 2.0, 3.0, 4.0], part), "bias": ([0.0], [bias])}
    for name, pair in gradients.items():
        for params, gradient in zip((whole, sharded), map(torch.tensor, pair), strict=True):
            params[name] = nn.Parameter(torch.zeros_like(gradient))
            params[name].grad = gradient
    specs = tuple(ShardSpec(0, (Shard(start, start + 2),)) for start in (0, 2))
    mark_part(sharded["part"], Part(torch.Size([4]), specs, 1))

    found = _different_gradient(whole, sharded, Group(1, (0, 1)))

    assert found == (differs and f"the gradient of {differs} differs")
