"""Models whose layers are computed as virtual parts: the same bits on 1, 2 and 4 processes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, StableLmConfig

from pipeline.config import LoraConfig
from pipeline.errors import ConfigError
from pipeline.models.divided_vocabulary import LARGE
from pipeline.models.tensor_cut import cut_layers
from pipeline.parallel.group import ALONE
from pipeline.parallel.mesh import cut_mesh
from tests.distributed import run_ranks
from tests.families import FAMILIES, tiny_causal_lm
from tests.pipeline.models.divided_models import learned
from tests.pipeline.models.test_tensor_cut import SMALL

GROUPED = ("llama", "qwen3", "mistral", "gemma", "gemma2")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # As many key heads as parts.
    **{name: (name, {"num_key_value_heads": 4} if name in GROUPED else {}) for name in FAMILIES},
    "falcon": ("falcon", {"multi_query": False, "bias": True}),
    "falcon, ALiBi": ("falcon", {"multi_query": False, "alibi": True}),
    "opt, many words, GELU": ("opt", {"vocab_size": LARGE, "activation_function": "gelu"}),
    "gpt2, many words, tied": ("gpt2", {"vocab_size": LARGE}),
    "qwen3, many words, biases": (
        "qwen3",
        {"vocab_size": LARGE, "attention_bias": True, "num_key_value_heads": 4},
    ),
    "gemma2, many words, capped": (
        "gemma2",
        {"vocab_size": LARGE, "tie_word_embeddings": False, "num_key_value_heads": 4},
    ),
}


SOME = (
    "llama",
    "qwen3, many words, biases",
    "opt, many words, GELU",
    "gpt2, many words, tied",
    "bloom",
)
"""That CI goes through; all of them are the grid."""

FEW = ("qwen3, many words, biases", "opt, many words, GELU")


def hand_made(mlp: nn.Module, values: Tensor) -> Tensor:
    """A Llama's MLP of 48 as two of 24 whose results are added."""
    gate, up, down = (mlp.get_parameter(f"{name}_proj.weight") for name in ("gate", "up", "down"))
    parts: list[Tensor] = []
    for own in (slice(0, 24), slice(24, 48)):
        inner = F.silu(F.linear(values, gate[own])) * F.linear(values, up[own])
        parts.append(F.linear(inner, down[:, own].contiguous()))
    return parts[0] + parts[1]


def test_a_module_adds_its_parts_in_their_order() -> None:
    model, plain = (tiny_causal_lm("llama") for _ in range(2))
    cut_layers(model, ALONE, sequence=False, parts=2)
    name = "model.layers.0.mlp"
    values = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))

    found = model.get_submodule(name)(values)

    assert torch.equal(found, hand_made(plain.get_submodule(name), values))
    assert not torch.equal(found, plain.get_submodule(name)(values))
    # Outside of a pass the module has its own parameters.
    params = dict(model.get_submodule(name).named_parameters())
    assert params["up_proj.weight"].shape == (48, 32)


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(VARIANTS), marks=pytest.mark.grid)], ids=("few", "all")
)
def test_parts_learn_what_whole_layers_do(names: tuple[str, ...]) -> None:
    for name in names:
        family, changes = VARIANTS[name]
        found, whole = learned(family, changes, parts=4), learned(family, changes)
        noise = 1e-6 * whole["norm"]  # which is all the gradient of keys' biases
        for key, expected in whole["gradients"].items():
            distance = (found["gradients"][key] - expected).norm()
            assert distance <= 1e-5 * expected.norm() + noise, f"{name}: {key}"
        for figure in ("norm", "loss", "logits"):
            assert found[figure] == pytest.approx(whole[figure], rel=1e-5), f"{name}: {figure}"
        assert found["roles"].keys() == {"whole"}


ADAPTERS: dict[str, tuple[str, dict[str, Any], LoraConfig]] = {
    "dropout": ("opt", {}, LoraConfig(rank=2, dropout=0.3)),
    "dropout, padded": ("bloom", {}, LoraConfig(rank=2, dropout=0.3)),
    "lengths, dropout": ("gpt2", {}, LoraConfig(rank=2, variant="dora", dropout=0.3)),
    "lengths, norms of heads": (
        "qwen3",
        {"num_key_value_heads": 4, "attention_bias": True},
        LoraConfig(rank=2, variant="dora"),
    ),
    "singular vectors": ("gpt2", {}, LoraConfig(rank=2, variant="pissa")),
    "orthogonal columns": ("opt", {}, LoraConfig(rank=2, variant="olora")),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_parts_learn_what_whole_ones_do_with_their_masks(name: str) -> None:
    family, changes, lora = ADAPTERS[name]
    found, whole = (learned(family, changes, parts=each, lora=lora) for each in (4, None))

    noise = 1e-6 * whole["norm"]
    assert found["gradients"].keys() == whole["gradients"].keys()
    for key, expected in whole["gradients"].items():
        distance = (found["gradients"][key] - expected).norm()
        assert distance <= 1e-5 * expected.norm() + noise, key
    for figure in ("norm", "loss", "logits"):
        assert found[figure] == pytest.approx(whole[figure], rel=1e-5), figure
    assert found["roles"].keys() == {"whole"}


def learned_together(
    names: tuple[str, ...], tp: int, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    with cut_mesh(replicas=1, tp=tp, timeout_seconds=60.0) as mesh:
        return {name: learned(*VARIANTS[name], mesh, parts=4, dtype=dtype) for name in names}


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("names", "tp", "dtype"),
    [
        (SOME, 4, torch.bfloat16),
        *(
            pytest.param(tuple(VARIANTS), tp, dtype, marks=pytest.mark.grid)
            for tp in (2, 4)
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
def test_a_family_finds_the_same_bits_on_any_number_of_processes(
    names: tuple[str, ...], tp: int, dtype: torch.dtype
) -> None:
    together, *_ = run_ranks(learned_together, names, tp, dtype, world_size=tp)

    for name in names:
        family, changes = VARIANTS[name]
        alone, found = learned(family, changes, parts=4, dtype=dtype), together[name]
        assert found["gradients"].keys() == alone["gradients"].keys()
        for key, expected in alone["gradients"].items():
            assert torch.equal(found["gradients"][key], expected), f"{name}: {key}"
        for figure in ("norm", "loss", "logits"):
            assert found[figure] == alone[figure], f"{name}: {figure}"


def test_layers_without_so_many_parts_are_refused() -> None:
    def refused(match: str, model: nn.Module, parts: int = 4) -> None:
        with pytest.raises(ConfigError, match=match):
            cut_layers(model, ALONE, sequence=False, parts=parts)

    refused(
        r"parallel\.arithmetic invariant:4 doesn't divide the 2 key heads of llama; take"
        r" invariant:2",
        tiny_causal_lm("llama"),
    )
    refused(
        r"invariant:4 doesn't divide the 1 key head of falcon; take fast", tiny_causal_lm("falcon")
    )
    refused(
        r"parallel\.arithmetic invariant:8 doesn't divide the 4 attention heads of gpt2",
        tiny_causal_lm("gpt2"),
        8,
    )
    refused(
        r"parallel\.arithmetic: there is no plan to divide stablelm; take fast",
        AutoModelForCausalLM.from_config(StableLmConfig(**SMALL)),
    )
    refused(
        r"invariant:4: the layers of mixtral can't be divided, since .*experts.*; take fast",
        AutoModelForCausalLM.from_config(MixtralConfig(**SMALL)),
    )
