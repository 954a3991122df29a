"""A sharded model equals the unsharded one, for every family with a plan."""

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
from inference.tensor_parallel import Sharding, kv_heads_here
from pipeline.config import LoraConfig
from pipeline.models.adapters.lora import add_lora
from pipeline.models.forward.packing import how_to_run
from pipeline.models.parallel.stages import cut_stage
from pipeline.parallel.group import ALONE, Group
from pipeline.parallel.mesh import current_mesh
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.system.errors import ConfigError
from tests.distributed import rank, run_ranks
from tests.families import FAMILIES, random_rows, tiny_causal_lm


class InPlace:
    """The weights of a model that is not sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def iter_gathered_units(self) -> Iterator[list[nn.Parameter]]:
        """All parameters as one unit."""
        yield list(self._model.parameters())


IDS = torch.tensor([row.input_ids for row in random_rows((9, 9, 9))])
PROMPTS = [[[5, 6, 7, 8, 9, 10, 11], [12, 13]], [[14, 15, 16]]]
"""By rank."""

WIDE: dict[str, Any] = {"vocab_size": 104, "tie_word_embeddings": False}
"""An output layer that can be divided."""

WITHOUT_PLAN = ("falcon", "gptj", "gpt_neo", "bloom")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES if family not in WITHOUT_PLAN},
    "llama, output layer divided": ("llama", WIDE),
}


def divided(model: PreTrainedModel, size: int) -> PreTrainedModel:
    tp_group = current_mesh().tp_group(size, timeout_seconds=60.0)
    replica = Replica(model, shares=True, tp_group=tp_group)
    replica.load(InPlace(model))
    return replica.model


def prepared(family: str, changes: dict[str, Any]) -> PreTrainedModel:
    model = tiny_causal_lm(family, **changes)
    if how_to_run(model).packed:
        model.set_attn_implementation("ragged")
    return model


def greedy(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    responses = generate(
        model, prompts, max_new_tokens=6, temperature=0.0, stop_ids=[2], seed=0, batch_size=2
    )
    return [response.ids for response in responses]


@torch.no_grad()
def ask_all(size: int) -> dict[str, tuple[Tensor, list[list[int]], int]]:
    """Logits, greedy answers to this process's prompts, and bytes of the process's weights."""
    said: dict[str, tuple[Tensor, list[list[int]], int]] = {}
    for name, (family, changes) in VARIANTS.items():
        model = divided(prepared(family, changes), size)
        num_bytes = sum(param.nbytes for param in model.parameters())
        said[name] = (model(input_ids=IDS).logits, greedy(model, PROMPTS[rank()]), num_bytes)
    return said


@pytest.mark.jobs
@torch.no_grad()
def test_two_processes_together_say_what_one_says() -> None:
    answers = run_ranks(ask_all, 2)

    for name, (family, changes) in VARIANTS.items():
        model = prepared(family, changes)
        logits = model(input_ids=IDS).logits
        num_bytes = sum(param.nbytes for param in model.parameters())
        for of, said in enumerate(answers):
            torch.testing.assert_close(said[name][0], logits, rtol=1e-5, atol=5e-5, msg=name)
            assert said[name][1] == greedy(model, PROMPTS[of]), name
            assert said[name][2] < 0.8 * num_bytes, name
        assert torch.equal(answers[0][name][0], answers[1][name][0]), name


def of_rank(of: int, size: int, family: str, **changes: Any) -> Sharding:
    return Sharding(tiny_causal_lm(family, **changes), Group(of, tuple(range(size))))


def test_a_key_head_for_two_processes_counts_once() -> None:
    shape = torch.Size([16, 32])  # 2 heads of 8
    specs = [
        of_rank(of, 4, "llama").spec("model.layers.0.self_attn.k_proj", "weight", shape)
        for of in range(4)
    ]

    assert specs == [
        ShardSpec(0, (Shard(0, 8, 2),)),
        ShardSpec(0, (Shard(0, 8, 2, counts=False),)),
        ShardSpec(0, (Shard(8, 16, 2),)),
        ShardSpec(0, (Shard(8, 16, 2, counts=False),)),
    ]


def test_the_bias_after_a_sum_is_added_once() -> None:
    first, second = (
        of_rank(of, 2, "opt").spec("model.decoder.layers.0.fc2", "bias", torch.Size([32]))
        for of in range(2)
    )

    assert first is None
    assert second is not None
    assert second.of(torch.ones(32)).tolist() == [0.0] * 32


@pytest.mark.parametrize(
    ("family", "size", "changes", "sentence"),
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
            "inference_tp_size 4 doesn't divide the 3 key heads of llama",
        ),
        *(
            (family, 2, {}, r"inference_tp_size.* 1$")
            for family in ("lfm2", "llama4_text", "bloom")
        ),
    ],
)
def test_what_cannot_be_divided_is_one_sentence(
    family: str, size: int, changes: dict[str, Any], sentence: str
) -> None:
    model = tiny_causal_lm(family, **changes)

    with pytest.raises(ConfigError, match=sentence):
        Replica(model, shares=True, tp_group=Group(0, tuple(range(size))))


def answer() -> dict[str, Any]:
    """Lengths of each process's own responses."""
    model = divided(prepared("llama", {}), 2)
    finished = generate_each(
        model,
        PROMPTS[rank()],
        Sampler(temperature=0.0, seed=0),
        max_new_tokens=9,
        cache_bytes=10**5 * (rank() + 1),
    )
    answers = {each.index: len(each.response.ids) for each in finished}
    return {"answers": answers, "kv_heads": kv_heads_here(model)}


def test_each_process_gets_the_responses_to_its_own_prompts() -> None:
    for own, result in zip(PROMPTS, run_ranks(answer), strict=True):
        assert result == {"answers": dict.fromkeys(range(len(own)), 9), "kv_heads": 1}


def drawn(family: str, lora: LoraConfig | None, precision: str) -> nn.Module:
    """A model of three blocks, with adapters that change its outputs."""
    model = getattr(prepared(family, {"num_hidden_layers": 3}), precision)()
    trained = model if lora is None else add_lora(model, lora, task="causal", seed=1)
    noise = torch.Generator().manual_seed(1)
    for param in trained.parameters():
        param.data += 0.1 * torch.randn(param.shape, generator=noise).to(param)
    return trained


@torch.no_grad()
def replica_of(trained: nn.Module, *, shares: bool, stages: Group) -> list[Any]:
    """Logits, answers and hash of a replica, before and after the trained weights change."""
    replica = Replica(trained, shares=shares, stages=stages)
    said: list[Any] = []
    for _ in range(2):
        assert all(param.isnan().all() for param in replica.model.parameters())
        replica.load(InPlace(trained))
        answers = greedy(replica.model, PROMPTS[0])
        said.append((replica.model(input_ids=IDS).logits, answers, replica.weights_hash()))
        for param in trained.parameters():
            param.data *= 1.25
        replica.release()
    return said


def of_stages(*model: Any, shares: bool) -> list[Any]:
    trained = drawn(*model)
    cut_stage(trained, number=rank(), blocks=[1, 2])
    return replica_of(trained, shares=shares, stages=current_mesh().world)


@pytest.mark.parametrize(
    ("model", "shares"),
    [(("llama", LoraConfig(rank=2), "float"), True), (("opt", None, "bfloat16"), False)],
    ids=["adapters", "tied weights"],
)
def test_every_stage_generates_with_the_weights_that_all_stages_train(
    model: tuple[str, LoraConfig | None, str], shares: bool
) -> None:
    expected = replica_of(drawn(*model), shares=True, stages=ALONE)

    for said in run_ranks(partial(of_stages, shares=shares), *model):
        for (logits, *rest), (its_logits, *others) in zip(expected, said, strict=True):
            assert torch.equal(its_logits, logits)
            assert others == rest
