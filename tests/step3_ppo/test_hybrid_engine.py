"""The flip: what generates is what trains, at every stage and division, and leaves no trace."""

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inference.generation import generate
from inference.weights.hash import bits_sum, weights_hash
from pipeline.config import (
    FrozenModelConfig,
    LoraConfig,
    OptimConfig,
    Precision,
    TrainedModelConfig,
)
from pipeline.config.zero import OffloadConfig, ZeroConfig
from pipeline.data.batches import collate
from pipeline.engine.engine import Engine
from pipeline.models.embedded import build_tokenizer
from pipeline.models.export import export, named_weights
from pipeline.models.forward import Policy, base_model
from pipeline.models.load import load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.parallel.mesh import current_mesh
from step3_ppo.hybrid_engine import HybridEngine
from tests.distributed import rank, run_ranks
from tests.families import random_rows, saved, tiny_causal_lm
from tests.memory import live_bytes

CPU = torch.device("cpu")
LORA = LoraConfig(rank=2, alpha=8.0)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
BATCH = collate(random_rows((9, 4, 7)))
OFFLOADED = ZeroConfig(offload=OffloadConfig(optimizer="cpu", params="cpu"))


class Actor:
    """A model in its engine, with what generates from it."""

    def __init__(
        self, path: str, *, tp_size: int = 1, resident: bool = False, **changes: Any
    ) -> None:
        optim = OptimConfig(lr=0.02, schedule="constant", warmup_ratio=0.0)
        config = TrainedModelConfig(path=path, optim=optim, **changes)
        plain = load_causal_lm(config, device=CPU, defer=config.zero_stage == 3)
        lora = config.lora
        self.model = plain if lora is None else add_lora(plain, lora, task="causal", seed=0)
        self.engine = Engine(Policy(self.model), config, total_steps=100)
        tp_group = current_mesh().tp_group(tp_size, timeout_seconds=60.0)
        self.hybrid = HybridEngine(self.engine, self.model, tp_group=tp_group, resident=resident)

    def learn(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.engine.backward(self.engine(BATCH).logprobs.square().mean())
            self.engine.step()

    def relearn(self, steps: int = 1) -> None:
        """Learn after a generation: what generated before is no longer what trains."""
        before = self.replica_logits()
        self.learn(steps)
        assert not torch.allclose(before, self.logits(), rtol=1e-3, atol=1e-3)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """What the trained model says, adapters and all."""
        with self.engine.gathered():
            return self.model(input_ids=IDS).logits

    @torch.no_grad()
    def replica_logits(self) -> Tensor:
        with self.hybrid.generating() as replica:
            return replica(input_ids=IDS).logits

    def sample(self, prompts: Sequence[Sequence[int]], keys: Sequence[int]) -> list[list[int]]:
        with self.hybrid.generating() as replica:
            responses = generate(
                replica,
                prompts,
                max_new_tokens=12,
                temperature=1.0,
                stop_ids=[3, 4, 5, 6, 7, 8, 9, 10],
                seed=1,
                keys=keys,
                batch_size=3,
            )
        return [response.ids for response in responses]

    def weights(self) -> dict[str, Tensor]:
        """Everything in the state dict, whole."""
        named = named_weights(base_model(self.model), self.engine)
        return {name: weight.clone() for name, weight in named}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tiny_causal_lm("llama"), tmp_path_factory.mktemp("llama"))


def logits_of_all(path: str) -> list[tuple[str, Tensor, Tensor]]:
    compared: list[tuple[str, Tensor, Tensor]] = []
    for stage, tp_size, lora in itertools.product(range(4), (1, 2, 4), (None, LORA)):
        actor = Actor(path, zero_stage=stage, tp_size=tp_size, lora=lora)
        actor.relearn()
        name = f"stage {stage}, tp {tp_size}, {'LoRA' if lora else 'all weights'}"
        compared.append((name, actor.replica_logits(), actor.logits()))
    return compared


def test_the_replica_says_what_the_trained_model_says_at_every_stage_and_division(
    llama: str,
) -> None:
    for compared in run_ranks(logits_of_all, llama, world_size=4):
        for name, got, expected in compared:
            if "tp 1" in name and "LoRA" not in name:
                assert torch.equal(got, expected), name
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=name)


@torch.no_grad()
def test_adapters_are_merged_as_the_export_merges_them(llama: str) -> None:
    actor = Actor(llama, lora=LORA)
    with torch.enable_grad():
        actor.relearn(3)
    exported = {name.replace(".base_layer", "") for name in actor.weights() if "lora_" not in name}

    with actor.hybrid.generating() as replica:
        merged = dict(replica.named_parameters())

        assert set(merged) == exported
        for name, layer in base_model(actor.model).named_modules():
            if hasattr(layer, "base_layer"):
                rank_2 = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
                expected = layer.base_layer.weight + 4.0 * rank_2  # alpha / rank
                assert torch.equal(merged[f"{name}.weight"], expected)


@torch.no_grad()
def test_an_adapter_on_bf16_weights_is_rounded_once(tmp_path: Path) -> None:
    path = saved(tiny_causal_lm("llama"), tmp_path)
    actor = Actor(path, lora=LORA, precision="bf16")
    with torch.enable_grad():
        actor.relearn()
    layer = base_model(actor.model).model.layers[0].mlp.up_proj
    update = 4.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight

    with actor.hybrid.generating() as replica:
        merged = replica.model.layers[0].mlp.up_proj.weight

    assert update.dtype == torch.float32
    assert torch.equal(merged, (layer.base_layer.weight.float() + update).bfloat16())


def flip_often(path: str, changes: dict[str, Any]) -> tuple[bool, int]:
    """Whether 100 flips with learning between them leave the frozen weights, and bytes more.

    After all of them the replica still says what the trained model says.
    """
    actor = Actor(path, **changes)
    actor.learn()
    frozen = {
        name: weight
        for name, weight in actor.weights().items()
        if changes.get("lora") is not None and "lora_" not in name
    }
    actor.replica_logits()
    gc.collect()
    before = live_bytes()
    for number in range(100):
        if number % 10 == 0:
            actor.learn()
        actor.hybrid.engine.zero.updates += 1  # so that every flip is a whole one
        with actor.hybrid.generating():
            pass
    gc.collect()
    after = live_bytes()
    torch.testing.assert_close(actor.replica_logits(), actor.logits(), rtol=1e-5, atol=1e-5)
    weights = actor.weights()
    return all(torch.equal(weights[name], old) for name, old in frozen.items()), after - before


@pytest.mark.parametrize(
    "changes",
    [
        {"lora": LORA},
        {"lora": LORA, "zero_stage": 3},
        {"lora": LORA, "zero_stage": 2, "tp_size": 2, "resident": True},
        {"zero_stage": 3, "zero": OFFLOADED},
    ],
    ids=["LoRA", "LoRA at stage 3", "LoRA divided, resident", "offloaded"],
)
def test_a_hundred_flips_change_no_frozen_byte_and_keep_no_memory(
    llama: str, changes: dict[str, Any]
) -> None:
    for unchanged, more_bytes in run_ranks(flip_often, llama, changes):
        assert unchanged
        assert more_bytes == 0


def train_with_flips(path: str, changes: dict[str, Any], flips: list[bool]) -> dict[str, Tensor]:
    actor = Actor(path, **changes)
    for flip in flips:
        if flip:
            actor.sample([[5, 6, 7], [8, 9]], keys=[2 * rank(), 2 * rank() + 1])
            torch.testing.assert_close(actor.replica_logits(), actor.logits(), rtol=1e-5, atol=1e-5)
        actor.learn()
    return actor.weights()


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_training_with_flips_is_training_without(
    llama: str, stage: int, tp_size: int, lora: LoraConfig | None
) -> None:
    changes = {"zero_stage": stage, "tp_size": tp_size, "lora": lora}

    (without, _), (flipped, _) = (
        run_ranks(train_with_flips, llama, changes, [flip] * 3) for flip in (False, True)
    )

    assert without.keys() == flipped.keys()
    assert all(torch.equal(flipped[name], weight) for name, weight in without.items())


PROMPTS: dict[str, list[list[list[int]]]] = {
    "other lengths": [[[5, 6, 7, 8, 9, 10, 11, 12, 13]], [[14], [15, 16], [17, 18, 19], [20]]],
    "none on one": [[], [[5, 6, 7], [8, 9]]],
    "none at all": [[], []],
    "as long as the context": [[[1, *range(3, 65)]], [[5, 6]]],
}
"""By rank."""


def double_weights(actor: Actor) -> None:
    """After a generation, so that the replica has to follow; alike on any number of processes."""
    actor.replica_logits()
    actor.engine.load_masters([2 * each for each in actor.engine.masters()])


def answer_own(
    path: str, tp_size: int, stage: int, cases: dict[str, list[list[list[int]]]]
) -> dict[str, list[list[int]]]:
    actor = Actor(path, tp_size=tp_size, zero_stage=stage)
    answers: dict[str, list[list[int]]] = {}
    double_weights(actor)
    for name, prompts in cases.items():
        own = prompts[rank()]
        answers[name] = actor.sample(own, keys=[100 * rank() + row for row in range(len(own))])
    return answers


def test_processes_answer_prompts_of_their_own_in_their_own_time(llama: str) -> None:
    alone = Actor(llama)
    unchanged = alone.logits()
    double_weights(alone)
    assert not torch.allclose(alone.logits(), unchanged, rtol=0.01, atol=0.01)
    expected = {
        name: [
            alone.sample(own, keys=[100 * of + row for row in range(len(own))])
            for of, own in enumerate(prompts)
        ]
        for name, prompts in PROMPTS.items()
    }
    lengths = [len(ids) for ids in itertools.chain(*expected["other lengths"])]
    assert len(set(lengths)) > 1  # some end early
    assert len(expected["as long as the context"][0][0]) == 1

    for tp_size, stage in itertools.product((1, 2), (0, 3)):
        answers = run_ranks(answer_own, llama, tp_size, stage, PROMPTS)
        for of, own in enumerate(answers):
            for name, ids in own.items():
                assert ids == expected[name][of], f"tp {tp_size}, stage {stage}, {name}"


def hashes(path: str, tp_size: int, stage: int, lora: LoraConfig | None) -> list[int]:
    actor = Actor(path, tp_size=tp_size, zero_stage=stage, lora=lora, precision="bf16")
    seen: list[int] = []
    for _ in range(3):
        for _ in range(2):
            with actor.hybrid.generating():
                pass
            seen.append(actor.hybrid.weights_hash)
        actor.learn()
    return seen


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "LoRA"])
def test_the_hash_is_that_of_the_weights_now_however_they_are_divided(
    lora: LoraConfig | None, tmp_path: Path
) -> None:
    path = saved(tiny_causal_lm("llama").bfloat16(), tmp_path)
    untrained = weights_hash(
        load_causal_lm(TrainedModelConfig(path=path, precision="bf16"), device=CPU)
    )
    ways = [run_ranks(hashes, path, tp, stage, lora) for tp, stage in ((1, 0), (2, 1), (2, 3))]

    first = ways[0][0]

    assert all(each == first for way in ways for each in way)
    assert first[0] == untrained
    assert [first[index] == first[index + 1] for index in (0, 2, 4)] == [True] * 3
    assert len(set(first)) == 3


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_hash_is_that_of_the_model_as_it_is_exported(
    llama: str, precision: Precision, lora: LoraConfig | None, tmp_path: Path
) -> None:
    actor = Actor(llama, lora=lora, precision=precision)
    actor.relearn()
    with actor.hybrid.generating():
        pass
    export(actor.model, build_tokenizer(), tmp_path, weights=actor.engine)

    exported = FrozenModelConfig(path=str(tmp_path), precision=precision)

    assert actor.hybrid.weights_hash == weights_hash(load_causal_lm(exported, device=CPU))


def test_one_changed_bit_changes_the_hash() -> None:
    model = nn.Linear(3, 5)
    before = weights_hash(model)

    for bit in (0, 15, 31):
        with torch.no_grad():
            bits = model.weight.view(torch.int32)
            bits[2, 1] ^= 1 << bit if bit < 31 else -(2**31)
            assert weights_hash(model) != before
            bits[2, 1] ^= 1 << bit if bit < 31 else -(2**31)

    assert weights_hash(model) == before


def test_parts_of_odd_width_add_up_to_the_hash_of_the_whole() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(5, 7).to(dtype)
        parts = whole.split([1, 4, 2], dim=1)
        starts = (0, 1, 5)

        added = sum(
            bits_sum(part, first=start).item() for part, start in zip(parts, starts, strict=True)
        )

        assert (added - bits_sum(whole).item()) % 2**64 == 0
        assert sum(bits_sum(row).item() for row in whole) % 2**64 == added % 2**64
    assert bits_sum(torch.tensor(1.0)).item() == 0x3F800000


def test_generation_inside_of_generation_leaves_the_outer_one_its_weights(llama: str) -> None:
    actor = Actor(llama, zero_stage=3)
    actor.relearn()
    expected = actor.logits()

    with actor.hybrid.generating() as replica, torch.no_grad():
        assert torch.equal(actor.replica_logits(), expected)
        assert torch.equal(replica(input_ids=IDS).logits, expected)

    assert not actor.hybrid.replica.loaded


def test_weights_that_stay_in_place_are_shared_and_not_copied(llama: str) -> None:
    actor = Actor(llama, zero_stage=2)

    with actor.hybrid.generating() as replica:
        theirs = dict(actor.model.named_parameters())
        for name, param in replica.named_parameters():
            assert param.data_ptr() == theirs[name].data_ptr()
            assert not param.requires_grad
    assert actor.hybrid.replica.num_bytes == 0


def test_a_released_replica_reads_as_nan_and_a_resident_one_keeps_its_memory(llama: str) -> None:
    released = Actor(llama, zero_stage=3)
    resident = Actor(llama, zero_stage=3, resident=True)
    for actor in (released, resident):
        actor.replica_logits()

    assert released.hybrid.replica.model(input_ids=IDS).logits.isnan().all()
    assert torch.equal(resident.hybrid.replica.model(input_ids=IDS).logits, resident.logits())
    for actor in (released, resident):
        with torch.enable_grad():
            actor.relearn()
        assert torch.equal(actor.replica_logits(), actor.logits())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_what_training_keeps_is_off_the_device_while_answers_are_generated(
    llama: str, stage: int, precision: str
) -> None:
    plain, offloading = (Actor(llama, zero_stage=stage, precision=precision) for _ in range(2))
    hybrid = HybridEngine(offloading.engine, offloading.model, offloading=(offloading.engine,))
    moments = sum(each.nbytes for group in offloading.engine.groups for each in group.moments())
    assert moments == 0
    for actor in (plain, offloading):
        actor.learn()
    moments = sum(each.nbytes for group in offloading.engine.groups for each in group.moments())

    for _ in range(2):
        expected = plain.logits()
        with hybrid.generating() as replica, torch.no_grad():
            moved = offloading.engine.rollout_offload.num_bytes
            assert torch.equal(replica(input_ids=IDS).logits, expected)
        assert moved >= moments > 0
        assert offloading.engine.rollout_offload.num_bytes == 0
        for actor in (plain, offloading):
            actor.learn()

    assert all(
        torch.equal(offloading.weights()[name], each) for name, each in plain.weights().items()
    )


def test_averaged_weights_generate_as_soon_as_they_are_set(llama: str) -> None:
    for stage in (0, 3):
        actor = Actor(llama, zero_stage=stage, resident=True)
        actor.learn()
        old, masters = actor.replica_logits(), [each.clone() for each in actor.engine.masters()]
        actor.relearn()
        assert not torch.equal(actor.replica_logits(), old)
        actor.engine.load_masters(masters)

        assert torch.equal(actor.replica_logits(), old)


def test_a_flip_that_is_broken_off_leaves_the_engine_sharded_and_usable(llama: str) -> None:
    actor = Actor(llama, zero_stage=3)
    turns = actor.engine.iter_gathered_units()
    next(turns)
    turns.close()

    assert actor.engine.zero.gathered_bytes == 0
    actor.learn()


def units_gathered(path: str) -> tuple[int, int]:
    """Most bytes gathered at a time during a flip, and those of the two largest units."""
    actor = Actor(path, zero_stage=3, zero=ZeroConfig(shared_memory=False, prefetch_units=1))
    zero = actor.engine.zero
    sizes = sorted(sum(flat.full.numel() * 4 for flat in unit.flats) for unit in zero.units)
    most = 0
    for _ in actor.engine.iter_gathered_units():
        most = max(most, zero.gathered_bytes)
    return most, sum(sizes[-2:])


def test_at_most_two_units_are_gathered_at_a_time(llama: str) -> None:
    for most, two_units in run_ranks(units_gathered, llama):
        assert 0 < most <= two_units
