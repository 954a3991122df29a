"""Two processes that compute each layer together find the gradients of one, parameter by name."""

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.models.parallel.tensor_parallel import _different_gradient
from pipeline.parallel.group import SELF_GROUP
from pipeline.parallel.mesh import split_mesh
from tests.distributed import run_ranks
from tests.pipeline.models.parallel.parallel_models import VARIANTS, learned

PARTIAL = {"qwen3": {"q_norm", "k_norm"}}
"""Modules with whole weights of whose gradient each process finds a part."""

SHARED = {"llama, one key head": {"k_proj", "v_proj"}}
"""Modules with rows that both processes have."""


ALL, FEW = tuple(VARIANTS), ("opt", "qwen3", "llama, one key head")


def learned_together(names: tuple[str, ...], sequence: bool) -> dict[str, dict[str, Any]]:
    with split_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
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
        assert found["roles"].get("overlapping", set()) == SHARED.get(name, set())
        theirs = other[name]["gradients"]
        assert all(torch.equal(found["gradients"][key], each) for key, each in theirs.items())


def test_the_first_parameter_with_another_gradient_is_named() -> None:
    whole, sharded = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    for param in (*whole.parameters(), *sharded.parameters()):
        param.grad = torch.full_like(param, 2.0)
    whole[0].bias.grad.zero_()
    changes = {
        "0.bias": 1e-6,
        "1.bias": 1e-3,
        "1.weight": 1e-2,
        "0.weight": -4.0,
    }  # two of rounding
    found: list[str | None] = []
    for name, change in changes.items():
        sharded.get_parameter(name).grad.copy_(whole.get_parameter(name).grad + change)
        found.append(_different_gradient(whole, sharded, SELF_GROUP))

    differ = [f"the gradient of {name} differs" for name in ("1.weight", "0.weight")]
    assert found == [None, None, *differ]
