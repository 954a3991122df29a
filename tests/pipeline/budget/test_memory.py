"""The memory formulas, compared with hand-computed numbers and measured runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pipeline.budget.fit import (
    CHECKPOINTING,
    OFFLOADED,
    find_shortage,
    for_models,
    replace_settings,
)
from pipeline.budget.machine import GIB, Machine, parse_machine
from pipeline.budget.memory import Location, step_memory
from pipeline.config import DataConfig, FrozenModelConfig, ParallelConfig, TrainedModelConfig
from pipeline.config.model import LoraConfig, OffloadConfig, ZeroConfig
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig

BLOCK = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
ROOT = 2 * 1000 * 64 + 64
LAYERS = 3
NUM_PARAMETERS = ROOT + LAYERS * BLOCK

GPU = Machine(1, 1, 2**40, None)
CPU = Machine(1, 1, None, 2**40)
EIGHT = Machine(8, 8, 2**40, None)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A directory with a configuration and no weights."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000}
    LlamaConfig(**shape, **heads, tie_word_embeddings=False).save_pretrained(tmp_path)
    return str(tmp_path)


def get_training_bytes(
    path: str, machine: Machine, location: Location = "device", *, model: Any = None, **step: Any
) -> dict[str, int]:
    """Return the bytes of the training phase by kind."""
    trained = TrainedModelConfig(path=path, **(model or {}))
    config = SFTConfig(model=trained, keep_best=False, **{"batch_size": 32, **step})
    memory = step_memory(config, machine=machine)
    assert not memory.unknown
    return dict(next(p for p in memory.phases if p.name == "train").bytes_by_kind(location))


def test_memory_of_model_states_in_one_process(llama: str) -> None:
    on_cpu, on_gpu = get_training_bytes(llama, CPU), get_training_bytes(llama, GPU)

    assert on_cpu["weights"] == 4 * NUM_PARAMETERS
    assert "masters" not in on_cpu
    assert on_cpu["moments"] == 8 * NUM_PARAMETERS
    assert on_cpu["gradients"] == 4 * NUM_PARAMETERS
    assert (on_gpu["weights"], on_gpu["masters"]) == (2 * NUM_PARAMETERS, 2 * NUM_PARAMETERS)


@pytest.mark.parametrize(
    ("precision", "params", "optimizer", "num_bytes"),
    [
        *[("fp16", "none", "none", 4), ("fp32", "cpu", "cpu", 0), ("fp32", "cpu", "none", 4)],
        *[("bf16", "cpu", "cpu", 2), ("bf16", "nvme", "nvme", 4)],
    ],
)
def test_masters_are_counted_as_the_engine_stores_them(
    llama: str, tmp_path: Path, precision: str, params: Any, optimizer: Any, num_bytes: int
) -> None:
    offload = OffloadConfig(params=params, optimizer=optimizer, nvme_path=tmp_path)
    model = {"precision": precision, "kernels": "off", "zero": ZeroConfig(offload=offload)}
    location = {"none": "device", "cpu": "host", "nvme": "disk"}[optimizer]

    kinds = get_training_bytes(llama, GPU, location, model={**model, "zero_stage": 3})

    assert kinds.get("masters", 0) == num_bytes * NUM_PARAMETERS


@pytest.mark.parametrize(
    ("stage", "weights", "states"), [(0, 1, 1), (1, 1, 8), (2, 1, 8), (3, 8, 8)]
)
def test_zero_stages_shard_states(llama: str, stage: int, weights: int, states: int) -> None:
    kinds = get_training_bytes(llama, EIGHT, model={"zero_stage": stage})

    assert kinds["weights"] == 2 * NUM_PARAMETERS // weights
    assert kinds["moments"] == 8 * NUM_PARAMETERS // states
    assert kinds["gradients"] == 4 * NUM_PARAMETERS // 8
    assert kinds.get("gathered", 0) == (2 * (ROOT + 2 * BLOCK) if stage == 3 else 0)


def test_offload_moves_states_to_host_memory(llama: str) -> None:
    settings = {"zero": replace_settings(TrainedModelConfig(), OFFLOADED).zero}

    device = get_training_bytes(llama, GPU, model=settings)
    host = get_training_bytes(llama, GPU, "host", model=settings)

    assert not {"masters", "moments", "gradients"} & device.keys()
    assert host["masters"] == host["gradients"] == 4 * NUM_PARAMETERS
    assert host["moments"] == 8 * NUM_PARAMETERS


def test_export_check_needs_a_copy_of_the_weights_on_the_cpu(llama: str) -> None:
    cpu = get_training_bytes(llama, CPU, micro_batch_size=1, data=DataConfig(max_length=8))

    assert cpu["activations"] + cpu["logits"] + cpu["export"] == 4 * NUM_PARAMETERS
    assert cpu["slack"] == 2**28  # the least that the allocator keeps
    assert get_training_bytes(llama, GPU, "host")["export"] == 2 * NUM_PARAMETERS


def test_tensor_and_pipeline_parallelism_shard_the_weights(llama: str) -> None:
    def weights(**parallel: Any) -> float:
        step = {"parallel": ParallelConfig(**parallel), "micro_batch_size": 1}
        return get_training_bytes(llama, EIGHT, **step)["weights"] / 2

    assert weights(tp=2) == NUM_PARAMETERS / 2
    assert weights(pp=2) == pytest.approx(LAYERS * BLOCK / 2 + ROOT / 2, abs=1)
    assert weights(replicas=2) == NUM_PARAMETERS


def make_ppo_config(actor: str, small_model: str, **settings: Any) -> PPOConfig:
    return PPOConfig(
        actor=TrainedModelConfig(path=actor),
        critic=TrainedModelConfig(path=small_model),
        **{"reward": FrozenModelConfig(path=small_model), **settings},
    )


def test_quantized_frozen_model_is_not_tensor_parallel(llama: str) -> None:
    def weights(tp: int) -> int:
        reward = FrozenModelConfig(path=llama, quantize="int8")
        config = make_ppo_config(llama, llama, reward=reward, parallel=ParallelConfig(tp=tp))
        return step_memory(config, machine=EIGHT).phases[0].bytes_by_kind("device")["weights"]

    assert 2 * weights(tp=2) - weights(tp=1) >= LAYERS * BLOCK  # the reward model, in bytes


def test_planned_memory_of_opt_ppo_matches_the_measured_one() -> None:
    """The measured peak on an H200 was 85.5 GB."""
    config = make_ppo_config(
        "facebook/opt-1.3b",
        "facebook/opt-350m",
        rollout_size=512,
        batch_size=512,
        micro_batch_size=32,
        generation_batch_size=512,
    )

    memory = step_memory(config, machine=parse_machine("1xH200-141GB"))

    assert memory.peak("device") == pytest.approx(85.5e9, rel=0.15)
    # CUDA graphs keep one decoding pass: logits, and of a block norms, attention and MLP, in bf16.
    bytes_per_row = 2 * (50_272 + 2 * 2 * 2048 + 4 * 2048 + 4 * 2048)
    (generate,) = (phase for phase in memory.phases if phase.name == "generate")
    assert generate.bytes_by_kind("device")["graphs"] == 512 * bytes_per_row + 2**25


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_generation_copies_adapters_and_base_only_at_stage_3(llama: str, quantize: Any) -> None:
    actor = TrainedModelConfig(path=llama, lora=LoraConfig(rank=4), quantize=quantize)
    config, generation = make_ppo_config(llama, llama), list[dict[str, int]]()
    for stage in (0, 3):
        config = replace(config, actor=replace(actor, zero_stage=stage))
        phases = {phase.name: phase for phase in step_memory(config, machine=EIGHT).phases}
        generation.append(dict(phases["generate"].bytes_by_kind("device")))
    unsharded, sharded = generation

    assert "replica" not in unsharded
    assert unsharded["weights"] - sharded["weights"] == pytest.approx(sharded["replica"] * 7 / 8)


FITS = {
    # DeepSpeed-Chat's tables (Yao et al. 2023): the largest actor of step 3 with a measured time.
    "1xV100-32GB+512GB": "1.3b",
    "1xA6000-48GB+512GB": "6.7b",
    "1xA100-80GB+512GB": "13b",
    "8xA100-40GB+2048GB": "30b",
    "8x8xA100-80GB+2048GB": "66b",
}


@pytest.mark.parametrize("machine", FITS)
def test_models_that_fit_deepspeed_chat_fit_here(machine: str) -> None:
    parsed = parse_machine(machine)
    config = make_ppo_config(
        f"facebook/opt-{FITS[machine]}",
        "facebook/opt-350m",
        micro_batch_size=1,
        inference_tp_size=min(parsed.processes, 8),
    )
    stage = 3 if parsed.world > 1 else 0
    settings = {"zero_stage": stage, **CHECKPOINTING, **OFFLOADED}
    config = replace_settings(config, for_models(config, settings))

    assert find_shortage(step_memory(config, machine=parsed), parsed) is None
    tiny = replace(parsed, gpu_bytes=4 * GIB)
    assert find_shortage(step_memory(config, machine=tiny), tiny) is not None
