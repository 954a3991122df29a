"""Two processes that compute each layer together find the gradients of one, parameter by name."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, StableLmConfig

from pipeline.config import LoraConfig
from pipeline.engine.tensor_parts import part_of, role_of
from pipeline.errors import ConfigError
from pipeline.models.block_codes import Form
from pipeline.models.divided_vocabulary import LARGE
from pipeline.models.lora import add_lora
from pipeline.models.quantized import quantize_layers
from pipeline.models.tensor_cut import cut_for_plan, cut_layers, divide, mismatch
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import cut_mesh
from tests.distributed import run_ranks
from tests.families import tiny_causal_lm
from tests.pipeline.models.divided_models import VARIANTS, learned

PARTIAL = {"qwen3": {"q_norm", "k_norm"}}
"""Modules with whole weights of whose gradient each process finds a part."""

SHARED = {"falcon": {"query_key_value"}, "falcon, ALiBi": {"query_key_value"}}
SHARED["llama, one key head"] = {"k_proj", "v_proj"}
"""Modules with rows that both processes have."""


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "num_local_experts": 2,
}


def learned_together(names: tuple[str, ...], sequence: bool) -> dict[str, dict[str, Any]]:
    with cut_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
        return {name: learned(*VARIANTS[name], mesh, sequence=sequence) for name in names}


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.grid)])
def test_two_processes_find_the_gradients_of_one_in_every_family(sequence: bool) -> None:
    together, other = run_ranks(learned_together, tuple(VARIANTS), sequence)

    for name, (family, changes) in VARIANTS.items():
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


def test_a_copy_of_a_divided_model_has_the_marks_of_its_parts() -> None:
    """Rows of a table of words, norms of which a process finds a part, codes, adapters."""
    model = add_lora(
        tiny_causal_lm("qwen3", vocab_size=LARGE), LoraConfig(rank=2), task="causal", seed=0
    )
    quantize_layers(model, Form("int8"))
    for param in model.parameters():
        param.requires_grad_(param.is_floating_point())
    cut_for_plan(model, 2, sequence=True)

    marks, copied = (
        {name: (part_of(each), role_of(each)) for name, each in one.named_parameters()}
        for one in (model, copy.deepcopy(model))
    )

    assert copied == marks
    assert {role for _, role in copied.values()} == {"whole", "partial", "part"}


"""Packed, packed with biases, padded."""


BROKEN = {
    "no sum": ("model.layers.1.self_attn.o_proj", "_forward_hooks", "they compute something else"),
    "no sum in the backward pass": (
        "model.layers.1.mlp.up_proj",
        "_forward_pre_hooks",
        "the gradient of model.embed_tokens.weight is another",
    ),
}
"""A layer, its hooks that are left out, and the error then."""


def broken(name: str) -> str | None:
    module, hooks, _ = BROKEN[name]

    def divide_badly(model: PreTrainedModel, group: Group, *, sequence: bool) -> None:
        divide(model, group, [], sequence=sequence)
        getattr(model.get_submodule(module), hooks).clear()

    with cut_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
        return mismatch(tiny_causal_lm("qwen3"), mesh.tensor, divide_badly, sequence=False)


@pytest.mark.parametrize("name", BROKEN)
def test_a_family_that_would_learn_something_else_is_found(name: str) -> None:
    assert run_ranks(broken, name) == [BROKEN[name][-1]] * 2


def test_layers_that_can_not_be_divided_are_refused() -> None:
    three = Group(0, (0, 1, 2))

    with pytest.raises(ConfigError, match=r"parallel\.tp 3 doesn't divide the 4 attention heads"):
        cut_layers(tiny_causal_lm("llama"), three, sequence=True)
    with pytest.raises(ConfigError, match=r"parallel\.tp: there is no plan to divide stablelm"):
        cut_layers(AutoModelForCausalLM.from_config(StableLmConfig(**SMALL)), three, sequence=True)
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj would be divided as"):
        cut_layers(AutoModelForCausalLM.from_config(MixtralConfig(**SMALL)), three, sequence=True)
