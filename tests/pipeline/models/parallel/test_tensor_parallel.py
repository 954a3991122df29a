"""Tensor-parallel gradients on two processes equal those of one process."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.models.adapters.quantized import quantize_layers
from pipeline.models.parallel import tensor_parallel
from pipeline.parallel.group import SELF_GROUP, Group
from pipeline.parallel.mesh import split_mesh
from tests.distributed import run_ranks
from tests.families import tiny_causal_lm
from tests.pipeline.models.parallel.parallel_models import VARIANTS, compute_results

PARTIAL = {
    "qwen3": {"q_norm", "k_norm"},
    "llama, replicated MLP, LoRA": {"default"},
    "gpt2, LoRA": {"default"},
}
"""Modules or adapters with full weights, for which each process has a partial gradient."""

SHARED = {
    "llama, one key head": {"k_proj", "v_proj"},
    "llama, replicated MLP, LoRA": {"base_layer", "default"},
}
"""Modules or adapters with rows that both processes have."""

ALL, FEW = tuple(VARIANTS), tuple({"opt": (), **PARTIAL, **SHARED})


def compute_in_parallel(names: tuple[str, ...], sequence: bool) -> dict[str, dict[str, Any]]:
    with split_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
        return {name: compute_results(name, mesh, sequence=sequence) for name in names}


@pytest.mark.parametrize(
    ("names", "sequence"),
    [(ALL, True), (FEW, False), pytest.param(ALL, False, marks=pytest.mark.grid)],
)
def test_tensor_parallelism_matches_one_process(names: tuple[str, ...], sequence: bool) -> None:
    first_rank, second_rank = run_ranks(compute_in_parallel, names, sequence)

    for name in names:
        single, results = compute_results(name), first_rank[name]
        assert results["gradients"].keys() == single["gradients"].keys()
        noise = 1e-6 * single["norm"]  # keys' biases have no other gradient
        for key, expected in single["gradients"].items():
            distance = (results["gradients"][key] - expected).norm()
            assert distance <= 1e-5 * expected.norm() + noise, f"{name}: {key}"
        for key in ("norm", "loss", "logits"):
            assert results[key] == pytest.approx(single[key], rel=1e-5), f"{name}: {key}"
        partial = PARTIAL.get(name, set())
        is_shared = not results["roles"].keys().isdisjoint({"partial", "overlapping"})
        assert results["sums_per_vector"] == float(is_shared)
        assert results["roles"].get("partial", set()) >= partial
        assert sequence or results["roles"].get("partial", set()) == partial
        assert results["roles"].get("overlapping", set()) == SHARED.get(name, set())
        other_gradients = second_rank[name]["gradients"]
        assert all(torch.equal(results["gradients"][key], x) for key, x in other_gradients.items())


class Large(LlamaForCausalLM):
    """A model for which memory is too small."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.register_forward_pre_hook(self._run_out)

    def _run_out(self, *_arguments: object) -> None:
        raise MemoryError


def test_quantized_frozen_model_is_not_sharded() -> None:
    model = tiny_causal_lm("llama").requires_grad_(requires_grad=False)
    quantize_layers(model, "int8")
    params = list(model.parameters())

    tensor_parallel.shard_if_possible(model, Group(0, (0, 1)), sequence=True)

    assert all(after is before for after, before in zip(model.parameters(), params, strict=True))


def test_lack_of_memory_is_not_a_property_of_the_family() -> None:
    model = Large(tiny_causal_lm("llama").config)
    with pytest.raises(MemoryError):
        tensor_parallel.find_mismatch(model, Group(0, (0, 1)), shards_tables=False, sequence=False)


def test_first_parameter_with_a_different_gradient_is_reported() -> None:
    full, sharded = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    for param in (*full.parameters(), *sharded.parameters()):
        param.grad = torch.full_like(param, 2.0)
    full[0].bias.grad.zero_()
    # The first two are rounding errors.
    changes = {"0.bias": 1e-6, "1.bias": 1e-3, "1.weight": 1e-2, "0.weight": -4.0}
    reports: list[str | None] = []
    for name, change in changes.items():
        sharded.get_parameter(name).grad.copy_(full.get_parameter(name).grad + change)
        reports.append(tensor_parallel._find_different_gradient(full, sharded, SELF_GROUP))
    sharded[0].weight.grad = full[1].weight.grad = None
    reports.append(tensor_parallel._find_different_gradient(full, sharded, SELF_GROUP))

    differ = [f"the gradient of {name} differs" for name in ("1.weight", "0.weight", "0.weight")]
    assert reports == [None, None, *differ]
