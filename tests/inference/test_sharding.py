"""A tensor-parallel replica matches the unsharded model, for every supported family."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.engine.sampling import Sampler
from inference.generation import generate, generate_each
from inference.replica import Replica
from inference.tensor_parallel import Sharding, get_local_kv_heads
from pipeline.config import LoraConfig
from pipeline.models.adapters.lora import add_lora
from pipeline.models.adapters.quantized import quantize_layers
from pipeline.models.forward.packing import detect_batching
from pipeline.models.parallel.stages import build_stage
from pipeline.parallel.group import SELF_GROUP, Group
from pipeline.parallel.mesh import current_mesh
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.system.errors import ConfigError
from tests.distributed import rank, run_ranks
from tests.families import FAMILIES, random_rows, tiny_causal_lm


class UnshardedWeights:
    """Weights of a model that isn't sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def iter_gathered_units(self) -> Iterator[list[nn.Parameter]]:
        """Yield all parameters as one unit."""
        yield list(self._model.parameters())


IDS = torch.tensor([row.input_ids for row in random_rows((9, 9, 9))])
PROMPTS = [[[5, 6, 7, 8, 9, 10, 11], [12, 13]], [[14, 15, 16]]]
"""Prompts by rank."""

WIDE: dict[str, Any] = {"vocab_size": 104, "tie_word_embeddings": False}
"""Changes for an output layer that can be sharded."""

UNSUPPORTED = ("falcon", "gptj", "gpt_neo", "bloom")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES if family not in UNSUPPORTED},
    "llama, sharded output layer": ("llama", WIDE),
}


def make_replica(model: PreTrainedModel, size: int) -> PreTrainedModel:
    tp_group = current_mesh().tp_group(size, timeout_seconds=60.0)
    replica = Replica(model, shares=True, tp_group=tp_group)
    replica.load(UnshardedWeights(model))
    return replica.model


def make_model(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    model = tiny_causal_lm(family, **changes)
    if detect_batching(model).packed:
        model.set_attn_implementation("ragged")
    return model


def generate_greedy(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    responses = generate(
        model, prompts, max_new_tokens=6, temperature=0.0, stop_ids=[2], seed=0, batch_size=2
    )
    return [response.ids for response in responses]


@torch.no_grad()
def run_variants(size: int) -> dict[str, tuple[Tensor, list[list[int]], int]]:
    """Return logits, greedy responses to this rank's prompts, and the bytes of its weights."""
    outputs: dict[str, tuple[Tensor, list[list[int]], int]] = {}
    for name, (family, changes) in VARIANTS.items():
        model = make_replica(make_model(family, changes), size)
        num_bytes = sum(param.nbytes for param in model.parameters())
        responses = generate_greedy(model, PROMPTS[rank()])
        outputs[name] = (model(input_ids=IDS).logits, responses, num_bytes)
    return outputs


@pytest.mark.jobs
@torch.no_grad()
def test_tensor_parallel_outputs_match_one_process() -> None:
    by_rank = run_ranks(run_variants, 2)

    for name, (family, changes) in VARIANTS.items():
        model = make_model(family, changes)
        logits = model(input_ids=IDS).logits
        num_bytes = sum(param.nbytes for param in model.parameters())
        for index, outputs in enumerate(by_rank):
            torch.testing.assert_close(outputs[name][0], logits, rtol=1e-5, atol=5e-5, msg=name)
            assert outputs[name][1] == generate_greedy(model, PROMPTS[index]), name
            assert outputs[name][2] < 0.8 * num_bytes, name
        assert torch.equal(by_rank[0][name][0], by_rank[1][name][0]), name


def make_sharding(index: int, size: int, family: str, **changes: Any) -> Sharding:
    return Sharding(tiny_causal_lm(family, **changes), Group(index, tuple(range(size))))


def test_key_head_shared_by_two_ranks_counts_once() -> None:
    shape = torch.Size([16, 32])  # 2 heads of 8
    specs = [
        make_sharding(index, 4, "llama").spec("model.layers.0.self_attn.k_proj", "weight", shape)
        for index in range(4)
    ]

    assert specs == [
        ShardSpec(0, (Shard(0, 8, 2),)),
        ShardSpec(0, (Shard(0, 8, 2, is_first_copy=False),)),
        ShardSpec(0, (Shard(8, 16, 2),)),
        ShardSpec(0, (Shard(8, 16, 2, is_first_copy=False),)),
    ]


def test_bias_after_a_reduction_is_added_once() -> None:
    first, second = (
        make_sharding(index, 2, "opt").spec("model.decoder.layers.0.fc2", "bias", torch.Size([32]))
        for index in range(2)
    )

    assert first is None
    assert second is not None
    assert second.extract(torch.ones(32)).tolist() == [0.0] * 32


@pytest.mark.parametrize(
    ("family", "size", "changes", "message"),
    [
        ("llama", 3, {}, "inference_tp_size 3 doesn't divide the 4 attention heads of llama"),
        (
            "llama",
            4,
            {"intermediate_size": 50},
            r"inference_tp_size 4 doesn't divide the width 50 of model\.layers\.0\.mlp",
        ),
        (
            "llama",
            4,
            {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3},
            "inference_tp_size 4 doesn't divide the 3 key/value heads of llama",
        ),
        *(
            (family, 2, {}, r"inference_tp_size.* 1$")
            for family in ("lfm2", "llama4_text", "bloom")
        ),
    ],
)
def test_unshardable_model_is_rejected(
    family: str, size: int, changes: dict[str, Any], message: str
) -> None:
    model = tiny_causal_lm(family, **changes)

    with pytest.raises(ConfigError, match=message):
        Replica(model, shares=True, tp_group=Group(0, tuple(range(size))))


def generate_own() -> dict[str, Any]:
    """Return the lengths of this rank's responses, and its number of key/value heads."""
    model = make_replica(make_model("llama", {}), 2)
    completions = generate_each(
        model,
        PROMPTS[rank()],
        Sampler(temperature=0.0, seed=0),
        max_new_tokens=9,
        cache_bytes=10**5 * (rank() + 1),
    )
    lengths = {completion.index: len(completion.response.ids) for completion in completions}
    return {"lengths": lengths, "kv_heads": get_local_kv_heads(model)}


def test_each_rank_gets_the_responses_to_its_prompts() -> None:
    for prompts, result in zip(PROMPTS, run_ranks(generate_own), strict=True):
        assert result == {"lengths": dict.fromkeys(range(len(prompts)), 9), "kv_heads": 1}


def make_trained(family: str, lora: LoraConfig | None, precision: str) -> nn.Module:
    """Return a model of three blocks, with random adapters on an nf4 base if `lora` is set."""
    model = getattr(make_model(family, {"num_hidden_layers": 3}), precision)()
    trained = model if lora is None else add_lora(model, lora, task="causal", seed=1)
    assert lora is None or quantize_layers(trained, "nf4") > 0
    noise = torch.Generator().manual_seed(1)
    for param in filter(torch.is_floating_point, trained.parameters()):
        param.data += 0.1 * torch.randn(param.shape, generator=noise).to(param)
    return trained


@torch.no_grad()
def run_replica(trained: nn.Module, *, shares: bool, stages: Group) -> list[Any]:
    """Return a replica's logits, responses and weight hash, before and after a weight update."""
    replica = Replica(trained, shares=shares, stages=stages)
    outputs: list[Any] = []
    for _ in range(2):
        assert all(p.isnan().all() for p in replica.model.parameters() if p.is_floating_point())
        replica.load(UnshardedWeights(trained))
        responses = generate_greedy(replica.model, PROMPTS[0])
        outputs.append((replica.model(input_ids=IDS).logits, responses, replica.weights_hash()))
        for param in filter(torch.is_floating_point, trained.parameters()):
            param.data *= 1.25
        replica.release()
    return outputs


def run_stage_replica(*model: Any, shares: bool) -> list[Any]:
    trained = make_trained(*model)
    build_stage(trained, number=rank(), blocks=[1, 2])
    return run_replica(trained, shares=shares, stages=current_mesh().world)


@pytest.mark.parametrize(
    ("model", "shares"),
    [(("llama", LoraConfig(rank=2), "float"), True), (("opt", None, "bfloat16"), False)],
    ids=["adapters", "tied weights"],
)
def test_pipeline_stages_generate_with_all_stages_weights(
    model: tuple[str, LoraConfig | None, str], shares: bool
) -> None:
    expected = run_replica(make_trained(*model), shares=True, stages=SELF_GROUP)

    for outputs in run_ranks(partial(run_stage_replica, shares=shares), *model):
        for (logits, *rest), (stage_logits, *stage_rest) in zip(expected, outputs, strict=True):
            assert torch.equal(stage_logits, logits)
            assert stage_rest == rest
