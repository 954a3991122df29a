"""The weight sync copies the trained weights at every stage, without side effects."""

from typing import Any

import pytest
import torch
from torch import Tensor

from inference.hybrid_engine import HybridEngine
from pipeline.config import LoraConfig
from pipeline.models.forward.forward import base_model
from tests.distributed import rank, run_ranks
from tests.inference.actors import IDS, LORA, OFFLOADED, Actor
from tests.memory import live_bytes
from tests.operators import OperatorRecorder


def compare_logits(path: str) -> list[tuple[int, str, Tensor, Tensor]]:
    compared: list[tuple[int, str, Tensor, Tensor]] = []
    nf4 = {"lora": LORA, "quantize": "nf4"}
    for stage, tp_size, changes in (
        # Every pair of a tensor-parallel size and kind of training, and every stage.
        *((0, 1, {}), (1, 2, {"lora": LORA}), (2, 4, {}), (3, 2, {}), (3, 4, {"lora": LORA})),
        *((3, 1, {"lora": LORA, "precision": "bf16"}), (1, 1, {**nf4, "precision": "bf16"})),
        *((0, 2, nf4), (3, 1, nf4), (3, 2, nf4)),
    ):
        actor = Actor(path, zero_stage=stage, tp_size=tp_size, **changes)
        actor.train_after_sync()
        name = f"stage {stage}, tp {tp_size}, {changes}"
        compared.append((tp_size, name, actor.replica_logits(), actor.logits()))
    return compared


@pytest.mark.jobs
def test_replica_logits_match_the_trained_model(llama: str) -> None:
    for compared in run_ranks(compare_logits, llama, world_size=4):
        for tp_size, name, actual, expected in compared:
            if tp_size == 1:
                assert torch.equal(actual, expected), name
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_replica_shares_base_and_adapters(llama: str, quantize: str) -> None:
    actor = Actor(llama, lora=LORA, quantize=quantize, precision="bf16")
    actor.hybrid = HybridEngine(actor.engine, actor.model, offloading=(actor.engine,))
    actor.train_after_sync()
    trained = dict(base_model(actor.model).named_parameters())

    with actor.hybrid.generating() as replica:
        weights = dict(replica.named_parameters())
        assert weights.keys() == trained.keys()
        assert all(weights[name].data_ptr() == trained[name].data_ptr() for name in trained)
    assert torch.equal(actor.replica_logits(), actor.logits())


@pytest.mark.parametrize("resident", [False, True])
def test_weights_are_copied_only_after_update_or_release(llama: str, resident: bool) -> None:
    actor = Actor(llama, zero_stage=3, resident=resident)
    with actor.hybrid.generating() as replica, torch.no_grad():
        seconds = actor.hybrid.seconds
        with OperatorRecorder(numel=1) as operators, actor.hybrid.generating():
            assert actor.hybrid.seconds > seconds  # of all syncs
        assert operators.names == []
        assert torch.equal(replica(input_ids=IDS).logits, actor.logits())
    with OperatorRecorder(numel=1) as operators, actor.hybrid.generating():
        pass
    assert (operators.names == []) == resident
    actor.train_after_sync()
    assert torch.equal(actor.replica_logits(), actor.logits())


def sync_repeatedly(path: str, changes: dict[str, Any]) -> int:
    """Sync 20 times; return the added bytes."""
    actor = Actor(path, **changes)
    actor.learn()
    actor.replica_logits()
    before = live_bytes()
    for number in range(20):
        if number % 4 == 0:
            actor.learn()
        actor.hybrid.engine.zero.updates += 1  # so that every sync copies all weights
        with actor.hybrid.generating():
            pass
    after = live_bytes()
    torch.testing.assert_close(actor.replica_logits(), actor.logits(), rtol=1e-5, atol=1e-5)
    return after - before


@pytest.mark.jobs
@pytest.mark.parametrize(
    "changes",
    [
        {"lora": LORA, "zero_stage": 3},
        {"lora": LORA, "zero_stage": 2, "tp_size": 2, "resident": True},
        {"zero_stage": 3, "zero": OFFLOADED},
    ],
    ids=["LoRA at stage 3", "LoRA, tensor-parallel, resident", "offloaded"],
)
def test_weight_syncs_leak_no_memory(llama: str, changes: dict[str, Any]) -> None:
    assert run_ranks(sync_repeatedly, llama, changes) == [0, 0]


def train_with_syncs(path: str, changes: dict[str, Any], syncs: list[bool]) -> dict[str, Tensor]:
    actor = Actor(path, **changes)
    for sync in syncs:
        if sync:
            actor.sample([[5, 6, 7], [8, 9]], keys=[2 * rank(), 2 * rank() + 1])
            torch.testing.assert_close(actor.replica_logits(), actor.logits(), rtol=1e-5, atol=1e-5)
        actor.learn()
    return actor.weights()


@pytest.mark.parametrize(
    ("stage", "tp_size", "lora"),
    [
        # Every pair of settings.
        pytest.param(0, 1, None, id="all weights"),
        pytest.param(3, 1, LORA, id="LoRA, stage 3"),
        pytest.param(0, 2, LORA, id="LoRA, tensor-parallel", marks=pytest.mark.jobs),
        pytest.param(3, 2, None, id="stage 3, tensor-parallel", marks=pytest.mark.jobs),
    ],
)
def test_weight_syncs_do_not_affect_training(
    llama: str, stage: int, tp_size: int, lora: LoraConfig | None
) -> None:
    changes = {"zero_stage": stage, "tp_size": tp_size, "lora": lora}

    (plain, _), (synced, _) = (
        run_ranks(train_with_syncs, llama, changes, [sync] * 3) for sync in (False, True)
    )

    assert plain.keys() == synced.keys()
    assert all(torch.equal(synced[name], weight) for name, weight in plain.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_training_state_is_offloaded_during_generation(
    llama: str, stage: int, precision: str
) -> None:
    plain, offloading = (Actor(llama, zero_stage=stage, precision=precision) for _ in range(2))
    hybrid = HybridEngine(offloading.engine, offloading.model, offloading=(offloading.engine,))
    groups = offloading.engine.groups
    assert not any(group.named_moments() for group in groups)
    for actor in (plain, offloading):
        actor.learn()
    moments = sum(m.nbytes for group in groups for m in group.named_moments().values())

    for _ in range(2):
        expected = plain.logits()
        with hybrid.generating() as replica, torch.no_grad():
            offloaded = offloading.engine.state_offload.num_bytes
            assert torch.equal(replica(input_ids=IDS).logits, expected)
        assert offloaded >= moments > 0
        assert offloading.engine.state_offload.num_bytes == 0
        for actor in (plain, offloading):
            actor.learn()

    assert all(
        torch.equal(offloading.weights()[name], weight) for name, weight in plain.weights().items()
    )
