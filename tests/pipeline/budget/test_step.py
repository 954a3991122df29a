"""What each model of each step takes, hand-computed."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.budget.machine import GIB, Machine
from pipeline.budget.models import models_of
from pipeline.budget.step import RUNTIME_CPU, RUNTIME_GPU, step_memory
from pipeline.budget.table import Item, Phase, StepMemory
from pipeline.config import FrozenModelConfig, LoraConfig, TrainedModelConfig
from pipeline.config.zero import OffloadConfig, ZeroConfig
from pipeline.demo.model import build_model, build_tokenizer
from pipeline.engine.predict import predict
from pipeline.models.known import KNOWN
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from tests.families import saved, tiny_causal_lm, tiny_classifier, tiny_config

PARAMETERS = sum(param.numel() for param in tiny_causal_lm("llama").parameters())
GPU = Machine(1, 1, 80 * GIB, None)
CPU = Machine(1, 1, None, None)
FOUR = replace(GPU, processes=4, world=4)
ENGINE = ("weights", "masters", "gradients", "moments")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    tiny_config("llama").save_pretrained(directory)
    return str(directory)


def memory(config: Any, machine: Machine = GPU, **origins: str) -> StepMemory:
    return step_memory(config, machine=machine, origins=origins)


def phase(name: str, config: Any, machine: Machine = GPU) -> Phase:
    return next(each for each in memory(config, machine).phases if each.name == name)


def kinds(items: tuple[Item, ...], role: str, place: str = "device") -> Counter[str]:
    """The largest item of each kind."""
    found = Counter[str]()
    for item in items:
        if (item.role, item.place) == (role, place) and item.num_bytes:
            found[item.kind] = max(found[item.kind], item.num_bytes)
    return found


def sft(path: str, **model: Any) -> SFTConfig:
    return SFTConfig(model=TrainedModelConfig(path=path, **model))


def ppo(path: str, **settings: Any) -> PPOConfig:
    frozen = FrozenModelConfig(path=path, precision="fp32")
    models = {
        role: TrainedModelConfig(path=path, precision="fp32", **settings.pop(role, {}))
        for role in ("actor", "critic")
    }
    lengths = {"max_prompt_length": 20, "max_new_tokens": 12}
    return PPOConfig(**models, reward=frozen, **{**lengths, **settings})


@pytest.mark.parametrize(
    ("precision", "machine", "weights", "masters"),
    [
        *(("fp32", GPU, 4, 0), ("bf16", CPU, 2, 2), ("fp16", CPU, 2, 4)),
        *(("auto", CPU, 4, 0), ("auto", GPU, 2, 2)),
    ],
)
def test_a_trained_model_holds_16_bytes_a_parameter_and_18_in_fp16(
    path: str, precision: str, machine: Machine, weights: int, masters: int
) -> None:
    found = kinds(phase("train", sft(path, precision=precision), machine).items, "model")
    padded = found["weights"] // weights  # flat vectors are

    assert memory(sft(path)).parameters == {"model": PARAMETERS}
    # Two blocks, embedding, norm and head: five vectors, each a multiple of 256 long.
    assert 0 <= padded - PARAMETERS < 5 * 256
    assert found["masters"] == masters * padded
    assert (found["gradients"], found["moments"]) == (4 * padded, 8 * padded)


def test_the_processes_share_what_the_stage_says(path: str) -> None:
    def shared(stage: int) -> list[float]:
        config = sft(path, precision="bf16", zero_stage=stage)
        part, whole = (
            kinds(phase("train", config, machine).items, "model") for machine in (FOUR, GPU)
        )
        return [round(whole[kind] / part[kind], 1) for kind in ENGINE]

    assert shared(0) == [1.0, 1.0, 4.0, 1.0]  # reduced sums are shared out at every stage
    assert shared(1) == shared(2) == [1.0, 4.0, 4.0, 4.0]
    assert shared(3) == [4.0, 4.0, 4.0, 4.0]


def test_what_is_offloaded_lies_in_main_memory(path: str) -> None:
    zero = ZeroConfig(offload=OffloadConfig(optimizer="cpu", gradients="cpu"))
    config = sft(path, precision="bf16", zero_stage=2, zero=zero)

    on_gpu, on_cpu = (phase("train", config, machine) for machine in (GPU, CPU))

    away = kinds(on_gpu.items, "model", "host")
    assert away.keys() == {"masters", "gradients", "moments", "best"}
    assert not away.keys() & kinds(on_gpu.items, "model").keys()
    # Where the model computes on the processor, its memory is the device's.
    assert kinds(on_cpu.items, "model", "host") == {}
    assert kinds(on_cpu.items, "model").keys() > set(ENGINE)


def test_with_adapters_only_they_have_gradients_and_moments(path: str) -> None:
    config = sft(path, precision="fp32", lora=LoraConfig(rank=2))
    found = kinds(phase("train", config).items, "model")
    # Rank 2: q and o 2 * (32 + 32), k and v 2 * (32 + 16), three of 2 * (32 + 48), in 2 blocks;
    # 928 of a block lie in a vector of 1024.
    assert memory(config).parameters == {"model": PARAMETERS + 2 * 928}
    assert (found["gradients"], found["moments"]) == (4 * 2 * 1024, 8 * 2 * 1024)


def test_the_actor_of_step_2_is_there_to_answer_alone(tmp_path: Path) -> None:
    path = saved(tiny_classifier("llama"), tmp_path / "m")
    frozen = FrozenModelConfig(path=path, precision="fp32")
    config = RewardConfig(model=TrainedModelConfig(path=path), actor=frozen)

    counted = memory(config)

    scorer = sum(param.numel() for param in tiny_classifier("llama").parameters())
    assert counted.parameters == {"model": scorer, "actor": PARAMETERS}
    by_phase = {each.name: kinds(each.items, "actor") for each in counted.phases}
    assert list(by_phase) == ["load", "score", "train", "generate"]
    assert not by_phase["load"] + by_phase["score"] + by_phase["train"]
    assert by_phase["generate"]["weights"] == 4 * PARAMETERS
    assert by_phase["generate"].keys() >= {"kv_cache", "logits", "activations"}


def test_the_reference_is_a_copy_of_the_actor_unless_adapters_train(path: str) -> None:
    whole = memory(ppo(path)).parameters
    adapters = memory(ppo(path, actor={"lora": LoraConfig()})).parameters

    assert whole is not None
    assert adapters is not None
    assert whole["reference"] == whole["actor"] == PARAMETERS
    assert adapters.keys() == {"actor", "critic", "reward"}


def test_at_stage_3_frozen_models_are_sharded_as_those_they_serve(path: str) -> None:
    def weights(actor: int, critic: int) -> dict[str, int]:
        config = ppo(path, actor={"zero_stage": actor}, critic={"zero_stage": critic})
        items = phase("train", config, FOUR).items
        return {
            role: kinds(items, role)["weights"]
            for role in ("actor", "critic", "reference", "reward")
        }

    sharded = weights(3, 2)
    assert sharded["reference"] == sharded["actor"]
    assert sharded["reward"] == 4 * sum(p.numel() for p in tiny_classifier("llama").parameters())
    assert weights(2, 3)["reward"] == weights(2, 3)["critic"]
    assert weights(2, 3)["reference"] == 4 * PARAMETERS
    frozen = kinds(phase("score", ppo(path, actor={"zero_stage": 3}), FOUR).items, "reference")
    assert frozen["gathered"] > 0
    assert not frozen["moments"] + frozen["masters"]


def test_the_replica_copies_what_is_sharded_merged_or_divided(path: str) -> None:
    def replica(machine: Machine = FOUR, **settings: Any) -> int:
        return kinds(phase("generate", ppo(path, **settings), machine).items, "actor")["replica"]

    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48  # q and o, k and v, the three of the MLP
    assert replica() == 0
    assert replica(actor={"zero_stage": 3}) == 4 * PARAMETERS
    assert replica(actor={"lora": LoraConfig(rank=2)}) == 4 * 2 * block
    assert replica(inference_tp_size=2) == 4 * 2 * block // 2


def test_the_base_comes_whole_beside_all_that_stays_and_may_be_left_out(path: str) -> None:
    base = FrozenModelConfig(path=path, precision="fp32")
    config = ppo(path, actor={"zero_stage": 3}, inference_tp_size=4, base=base)
    counted = memory(config, FOUR)
    phases = {each.name: each for each in counted.phases}

    assert list(phases) == ["load", "generate", "score", "train", "compare"]
    assert [each.name for each in counted.phases if each.optional] == ["compare"]
    compare = phases.pop("compare")
    assert not any(item.role == "base" for each in phases.values() for item in each.items)
    whole = kinds(compare.items, "base")
    assert whole["weights"] == kinds(compare.items, "base", "host")["weights"] == 4 * PARAMETERS
    assert kinds(compare.items, "actor").keys() >= {"weights", "moments"}
    assert "replica" not in kinds(compare.items, "actor")
    keys = [i.least for i in (*compare.items, *phases["generate"].items) if i.kind == "kv_cache"]
    assert keys[0] == 2 * (keys[1] or 0)  # two heads of keys, not one for each of four processes


def test_the_actors_gradients_stay_while_the_critic_works_and_not_the_reverse(path: str) -> None:
    def beside(of: str, pass_of: str, **settings: Any) -> bool:
        config = ppo(path, rollout_size=8, **settings)
        (item,) = (
            i
            for i in phase("train", config).items
            if (i.kind, i.role) == ("gradients", of) and "update" in (i.moments or ())
        )
        return f"{pass_of} blocks" in (item.moments or ())

    one, two = {"batch_size": 8, "micro_batch_size": 8}, {"batch_size": 8, "micro_batch_size": 4}
    assert beside("actor", "critic", **one)
    assert beside("actor", "critic", **two)
    assert not beside("critic", "actor", **one)
    # The actor has gone through all of its micro-batches before the critic begins.
    assert not beside("critic", "actor", **two)
    # The critic has been updated by the time the actor reads texts.
    assert not beside("critic", "texts", **two, ptx_coef=1.0)
    assert beside("actor", "texts", **one, ptx_coef=1.0)


def test_texts_beside_ppo_are_a_pass_like_those_of_step_1(path: str) -> None:
    def passes(config: Any) -> dict[str, int]:
        long = replace(config, data=replace(config.data, max_length=48), micro_batch_size=4)
        return {
            moment: item.num_bytes
            for item in phase("train", replace(long, batch_size=8)).items
            for moment in item.moments or ()
            if item.kind == "activations" and moment.endswith(" blocks")
        }

    assert passes(ppo(path)).keys() == {"actor blocks", "critic blocks"}
    step_1 = passes(sft(path, precision="fp32"))
    assert passes(ppo(path, ptx_coef=1.0))["texts blocks"] == step_1["model blocks"]


def test_keys_and_values_take_whole_blocks_of_tokens(path: str) -> None:
    config = ppo(path, rollout_size=128, generation_batch_size=64)
    item = next(i for i in phase("generate", config).items if i.kind == "kv_cache")

    # 20 + 12 tokens are one block of 32, one more is spare; 2 layers of 2 key heads of 8, in fp32.
    slot = (32 + 32) * 2 * 2 * 2 * 8 * 4
    assert (item.num_bytes, item.least) == (64 * slot, slot)
    fewer = next(i for i in phase("generate", config, FOUR).items if i.kind == "kv_cache")
    assert fewer.num_bytes == 32 * slot  # a process has no more prompts


def test_what_sleeps_while_answers_are_made_lies_in_main_memory(path: str) -> None:
    config = ppo(path, offload_in_generation=True)

    awake, asleep = (phase(name, config).items for name in ("train", "generate"))

    assert kinds(awake, "critic").keys() >= {"weights", "moments"}
    assert kinds(asleep, "critic", "host").keys() == {"weights", "moments"}
    # The replica reads the actor's weights where they are.
    assert kinds(asleep, "actor", "host").keys() == {"moments", "best"}
    assert "weights" in kinds(asleep, "actor")


def test_the_average_and_the_best_weights_are_copies_of_the_masters(path: str) -> None:
    trained = kinds(phase("train", ppo(path, ema_decay=0.99)).items, "actor")
    best = kinds(phase("score", sft(path, precision="fp32")).items, "model", "host")

    assert trained["ema"] == trained["moments"] // 2
    assert "ema" not in kinds(phase("train", ppo(path)).items, "actor")
    assert best["best"] == trained["ema"]


def test_a_process_takes_something_for_itself(path: str) -> None:
    on_gpu, on_cpu = (phase("load", sft(path), machine) for machine in (GPU, CPU))

    assert on_gpu.by_kind("device")["runtime"] == RUNTIME_GPU
    assert on_gpu.by_kind("host")["runtime"] == RUNTIME_CPU
    assert on_cpu.by_kind("device")["runtime"] == RUNTIME_CPU


def test_models_are_read_to_their_place_and_are_not_in_main_memory_before(path: str) -> None:
    config = sft(path, precision="fp32")

    assert not kinds(phase("load", config).items, "model", "host")
    assert kinds(phase("load", config).items, "model")["weights"] >= 4 * PARAMETERS
    sharded = phase("load", sft(path, precision="fp32", zero_stage=3), FOUR)
    assert not kinds(sharded.items, "model", "host")
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32  # more than the two tables
    assert kinds(sharded.items, "model")["gathered"] == 4 * block


def test_a_larger_micro_batch_takes_as_much_more_as_it_has_tokens(path: str) -> None:
    def activations(size: int, **model: Any) -> int:
        config = replace(sft(path, **model), micro_batch_size=size)
        config = replace(config, data=replace(config.data, max_length=48))
        return phase("train", config).by_kind("device")["activations"]

    assert activations(8) == pytest.approx(2 * activations(4), rel=0.02)
    assert activations(8, gradient_checkpointing=True) < activations(8)


def test_a_model_yet_to_be_made_has_the_size_of_the_one_it_starts_from(path: str) -> None:
    assert memory(sft("step1"), step1=path).parameters == {"model": PARAMETERS}


def test_a_model_on_the_hub_is_unknown_until_it_is_downloaded() -> None:
    counted = memory(sft("someone/never-downloaded"))

    assert counted.parameters == {}
    assert counted.unknown == (
        "model someone/never-downloaded is not counted: it is not downloaded, or has no"
        " configuration that can be read",
    )


def test_the_embedded_model_is_counted_exactly() -> None:
    model = build_model(vocab_size=len(build_tokenizer()), seed=1)

    assert memory(sft("embedded")).parameters == {"model": model.num_parameters()}


def test_a_config_of_no_known_model_gives_no_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))

    assert memory(sft(str(tmp_path))).parameters == {}


@pytest.mark.parametrize("name", KNOWN)
def test_the_models_of_the_presets_have_the_size_of_their_name(name: str) -> None:
    config = sft(name, zero_stage=3)
    (model,) = models_of(config.workload(1), {}, has_gpu=True)
    size = name.lower().rpartition("-")[2]
    said = {
        "hf": name.rpartition("-")[0].rpartition("-")[2],
        "1b1": "1.1b",
        "ai-forever/mgpt": "1.4b",
        "community/gpt2": "124m",
        "medium": "355m",
        "large": "774m",
        "xl": "1.56b",
    }
    words = said.get(size, "1.4b" if size.endswith("mgpt") else size).lower()
    expected = float(words[:-1]) * {"m": 1e6, "b": 1e9}[words[-1]]
    # Names are round: Qwen2.5-7B has 7.6, Llama-3.2-1B 1.24, OPT-350M 331, Qwen2.5-1.5B 1.54.
    assert model.parameters == pytest.approx(expected, rel=0.25)


def test_the_published_sizes_are_counted_to_the_parameter() -> None:
    def count(name: str) -> int:
        (model,) = models_of(sft(name).workload(1), {}, has_gpu=True)
        return model.parameters

    # From the safetensors of each on the Hub.
    assert count("facebook/opt-125m") == 125_239_296
    assert count("facebook/opt-1.3b") == 1_315_758_080
    assert count("meta-llama/Llama-2-7b-hf") == 6_738_415_616
    assert count("openai-community/gpt2") == 124_439_808
    assert count("openai-community/gpt2-xl") == 1_557_611_200
    assert count("meta-llama/Llama-3.1-8B") == 8_030_261_248
    assert count("meta-llama/Llama-3.1-70B") == 70_553_706_496
    assert count("Qwen/Qwen2.5-7B") == 7_615_616_512


def test_the_engine_is_counted_by_its_own_layout(path: str) -> None:
    config = sft(path, precision="bf16", zero_stage=3)
    (model,) = models_of(config.workload(1), {}, has_gpu=True)
    import torch

    expected = predict(
        model.present,
        replace(config.model, precision="bf16"),
        world=4,
        device=torch.device("cuda"),
        micro_batches=1,
    )
    found = kinds(phase("train", config, FOUR).items, "model")

    assert {kind: found[kind] for kind in expected} == expected
