"""The predicted bytes are those that the engine holds, on real processes."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pipeline.config import LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.config.zero import OffloadConfig, ZeroConfig
from pipeline.engine.engine import Engine
from pipeline.engine.flat import FlatParams
from pipeline.engine.predict import HELD, KINDS, offloaded, predict, state_vectors, streamed
from pipeline.engine.trained import TrainedParams
from pipeline.models.lora import add_lora
from tests.distributed import run_ranks
from tests.families import VOCAB, tiny_causal_lm, tiny_config

WORLD = 2
CPU = torch.device("cpu")
GPU = torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16)


def settings(stage: int, *, lora: bool = False, **others: Any) -> TrainedModelConfig:
    return TrainedModelConfig(
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        lora=LoraConfig(rank=2, lr=1e-3) if lora else None,
        **{"optim": OptimConfig(weight_decay=0.1), **others},
    )


def full(dtype: torch.dtype) -> nn.Module:
    return nn.Module.to(tiny_causal_lm("opt", hidden_size=28, word_embed_proj_dim=28), dtype)


def tied(dtype: torch.dtype) -> nn.Module:
    return nn.Module.to(tiny_causal_lm("gpt2", tie_word_embeddings=True, n_layer=3), dtype)


def deep(dtype: torch.dtype) -> nn.Module:
    return nn.Module.to(tiny_causal_lm("llama", num_hidden_layers=5), dtype)


def adapters(dtype: torch.dtype) -> nn.Module:
    model = tiny_causal_lm("llama")
    nn.Module.to(model, dtype)
    return add_lora(model, LoraConfig(rank=2), task="causal", seed=0)


MODELS: tuple[Callable[[torch.dtype], nn.Module], ...] = (full, tied, deep, adapters)


def bytes_of_weights(flat: FlatParams) -> int:
    """Memory of the weights between uses."""
    return flat.shard.nbytes if flat.placement.shard_params else flat.full.nbytes


def trained_bytes(groups: list[TrainedParams]) -> dict[str, int]:
    """Bytes of this process's masters that aren't the weights themselves, gradients and moments."""
    masters = sum(
        each.nbytes
        for group in groups
        for each in (group.masters.param, group.masters.low_bits)
        if each is not None
        and each.untyped_storage().data_ptr()
        not in (
            group.flat.full.untyped_storage().data_ptr(),
            group.flat.shard.untyped_storage().data_ptr(),
        )
    )
    moments = sum(each.nbytes for group in groups for each in group.moments())
    gradients = sum(each.nbytes for group in groups for each in group.gradients.sum.tensors())
    return {"masters": masters, "gradients": gradients, "moments": moments}


def one_step(engine: Engine, *, micro_batches: int = 1) -> dict[str, int]:
    """Bytes that the engine's own vectors have, by kind: some before, the others after the step."""
    for micro_batch in range(micro_batches):
        ids = torch.arange(14).view(2, 7) + micro_batch
        engine.backward(engine(input_ids=ids, use_cache=False).logits.float().square().mean())
    before = {
        "gradients": trained_bytes(engine.groups)["gradients"],
        "gradient_buffers": engine.pool.num_bytes + engine.comm.num_bytes,
    }
    engine.step()
    after = trained_bytes(engine.groups)
    assert after.pop("gradients") == 0
    flats = [flat for unit in engine.zero.units for flat in unit.flats]
    return {**before, **after, "weights": sum(map(bytes_of_weights, flats))}


def wrong_predictions() -> list[str]:
    """Cases on this rank in which the engine holds other bytes than were predicted."""
    wrong: list[str] = []
    for make, dtype, stage in product(MODELS, DTYPES, range(4)):
        model, config = make(dtype), settings(stage, lora=make is adapters)
        expected = predict(model, config, world=WORLD)
        engine = Engine(model, config, total_steps=2)
        got = one_step(engine)
        wrong += [
            f"{make.__name__} {dtype} stage {stage}: {kind} {num_bytes}, not {expected[kind]}"
            for kind, num_bytes in got.items()
            if num_bytes != expected[kind]
        ]
    return wrong


@pytest.mark.jobs
def test_two_processes_hold_what_was_predicted() -> None:
    assert run_ranks(wrong_predictions, world_size=WORLD) == [[], []]


def large(dtype: torch.dtype) -> nn.Module:
    """Whose embedding and output matrix are larger than two blocks."""
    return nn.Module.to(tiny_causal_lm("llama", vocab_size=4096, num_hidden_layers=3), dtype)


def gathered_peak(
    make: Callable[[torch.dtype], nn.Module], stage: int, shared_memory: Any
) -> tuple[int, int]:
    """The most bytes of gathered weights at any unit, and what was predicted."""
    zero = ZeroConfig(shared_memory=shared_memory)
    model, config = make(torch.bfloat16), settings(stage, zero=zero)
    expected = predict(model, config, world=WORLD)["gathered"]
    engine = Engine(model, config, total_steps=2)
    seen: list[int] = []
    for unit in engine.zero.others:
        unit.module.register_forward_hook(
            lambda *_: seen.append(engine.zero.gathered_bytes), prepend=True
        )
    one_step(engine)  # in which nobody knows yet what comes after a block
    one_step(engine)
    return max(seen), expected


@pytest.mark.parametrize(
    ("make", "stage", "shared_memory"),
    [(tied, 2, True), (tied, 3, True), (tied, 3, False), (large, 3, True), (large, 3, False)],
)
def test_the_peak_of_gathered_weights_is_predicted(
    make: Callable[[torch.dtype], nn.Module], stage: int, *, shared_memory: bool
) -> None:
    for peak, expected in run_ranks(gathered_peak, make, stage, shared_memory, world_size=WORLD):
        assert peak == expected
        assert (peak > 0) == (stage == 3)


def test_of_embedding_and_output_matrix_one_is_whole_at_a_time() -> None:
    found = predict(large(torch.bfloat16), settings(3), world=2, device=GPU)

    # Each has 4096 x 32 weights; a block has 7936 and the root 256, with their padding.
    assert found["gathered"] == 2 * (131072 + 7936 + 256)
    assert found["gradient_buffers"] == 4 * (131072 + 2 * 7936 + 256)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 7])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_deterministic_mode_holds_partial_sums(stage: int, micro_batches: int) -> None:
    model, config = full(torch.float32), settings(stage, zero=ZeroConfig(reduction="deterministic"))
    expected = predict(model, config, world=1, micro_batches=micro_batches)
    plain = predict(model, settings(stage), world=1)["gradients"]
    engine = Engine(model, config, total_steps=2)
    most = 0
    for _ in range(micro_batches):
        engine.backward(engine(input_ids=torch.arange(8).view(1, 8)).logits.mean())
        most = max(most, trained_bytes(engine.groups)["gradients"])

    assert most == expected["gradients"]
    # 1, 1, 2 or 3 sums of 1, 2 and 4 micro-batches.
    assert most == plain * {1: 1, 2: 1, 3: 2, 7: 3}[micro_batches]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_single_process_needs_buffers_from_its_second_micro_batch(micro_batches: int) -> None:
    model, config = tied(torch.float32), settings(0)
    expected = predict(model, config, world=1, micro_batches=micro_batches)
    engine = Engine(model, config, total_steps=2)

    got = one_step(engine, micro_batches=micro_batches)

    assert got["gradient_buffers"] == expected["gradient_buffers"]
    assert (expected["gradient_buffers"] > 0) == (micro_batches == 2)


@pytest.mark.parametrize(
    ("optim", "vectors"),
    [
        (OptimConfig(), 2),
        (OptimConfig(params={"amsgrad": True}), 3),
        (OptimConfig(name="SGD"), 0),
        (OptimConfig(name="SGD", params={"momentum": 0.9}), 1),
        (OptimConfig(name="Adagrad"), 1),
        (OptimConfig(name="RMSprop", params={"centered": True, "momentum": 0.5}), 3),
        (OptimConfig(name="Adamax"), 2),
    ],
    ids=lambda value: value.name if isinstance(value, OptimConfig) else "",
)
def test_every_optimizer_has_its_own_number_of_vectors(optim: OptimConfig, vectors: int) -> None:
    model, config = full(torch.float32), settings(1, optim=optim)
    engine = Engine(model, config, total_steps=2)

    assert state_vectors(optim) == vectors
    assert one_step(engine)["moments"] == predict(model, config, world=1)["moments"]


class Blocks(nn.Module):
    """Blocks of 1000 and 2000 weights and a root of 30.

    On 2 processes vectors are padded to multiples of 16 * 16: 1024, 2048 and 256, together 3328.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(size, 20, bias=False) for size in (50, 100)])
        self.head = nn.Linear(30, 1, bias=False)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, (2 * 3328, 2 * 3328, 8 * 3328, 4 * 1664, 4 * 3328, 0)),
        (1, (2 * 3328, 2 * 1664, 8 * 1664, 4 * 1664, 4 * 3328, 0)),
        (2, (2 * 3328, 2 * 1664, 8 * 1664, 4 * 1664, 4 * 3328, 0)),
        (3, (2 * 1664, 2 * 1664, 8 * 1664, 4 * 1664, 4 * 3328, 2 * 3328)),
    ],
)
def test_stages_share_out_more_and_more(stage: int, expected: tuple[int, ...]) -> None:
    model = Blocks().to(torch.bfloat16)

    assert predict(model, settings(stage), world=2, device=GPU) == dict(
        zip(KINDS, expected, strict=True)
    )


def test_without_gathering_ahead_one_block_is_there_at_a_time() -> None:
    config = settings(3, zero=ZeroConfig(prefetch_units=0))

    assert predict(Blocks(), config, world=2, device=GPU)["gathered"] == 4 * (256 + 2048)
    assert predict(Blocks(), settings(3), world=2, device=CPU)["gathered"] == 4 * (256 + 2048)


def test_a_model_without_memory_is_predicted_alike() -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            tiny_config("opt", hidden_size=28, word_embed_proj_dim=28), dtype=torch.bfloat16
        )

    assert predict(empty, settings(3), world=3) == predict(
        full(torch.bfloat16), settings(3), world=3
    )


def test_offloaded_fp32_weights_have_masters_on_the_host() -> None:
    config = settings(1, zero=ZeroConfig(offload=OffloadConfig(optimizer="cpu")))

    assert predict(Blocks(), config, world=2, device=GPU)["masters"] == 4 * 1664
    assert predict(Blocks(), config, world=2, device=CPU)["masters"] == 0
    assert predict(Blocks(), settings(1), world=2, device=GPU)["masters"] == 0
    assert offloaded(config, GPU) == {"masters": "cpu", "moments": "cpu"}
    assert offloaded(config, CPU) == {}


def test_on_a_disk_are_masters_of_fp32_weights_too(tmp_path: Path) -> None:
    offload = OffloadConfig(optimizer="nvme", nvme_path=tmp_path)
    config = settings(2, zero=ZeroConfig(offload=offload))

    assert predict(Blocks(), config, world=2, device=CPU)["masters"] == 4 * 1664
    assert offloaded(config, CPU) == {"masters": "nvme", "moments": "nvme"}


def test_weights_on_a_disk_have_masters_in_memory(tmp_path: Path) -> None:
    offload = OffloadConfig(params="nvme", nvme_path=tmp_path)
    for dtype in DTYPES:
        model, config = full(dtype), settings(3, zero=ZeroConfig(offload=offload))
        expected = predict(model, config, world=1)["masters"]

        engine = Engine(model, config, total_steps=2)

        assert one_step(engine)["masters"] == expected
        assert expected == sum(4 * group.masters.numel for group in engine.groups)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, 2),
        ({"kernels": "off"}, 4),
        ({"optim": OptimConfig(name="SGD")}, 4),
        ({"optim": OptimConfig(params={"amsgrad": True})}, 4),
        ({"zero": ZeroConfig(offload=OffloadConfig(optimizer="cpu"))}, 4),
        ({"zero": ZeroConfig(offload=OffloadConfig(params="cpu"))}, 4),
        ({"zero": ZeroConfig(offload=OffloadConfig(optimizer="cpu", params="cpu"))}, 2),
    ],
    ids=str,
)
def test_masters_of_bf16_weights_take_2_bytes_where_they_can_be_split_on_a_gpu(
    changes: dict[str, Any], held: int
) -> None:
    model = Blocks().to(torch.bfloat16)

    masters = predict(model, settings(3, **changes), world=2, device=GPU)["masters"]

    assert masters == held * 1664
    assert predict(model.half(), settings(3, **changes), world=2, device=GPU)["masters"] == 4 * 1664


def test_what_lies_on_a_disk_passes_through_buffers_of_the_largest_vector(tmp_path: Path) -> None:
    optimizer = OffloadConfig(optimizer="nvme", nvme_path=tmp_path)
    weights = OffloadConfig(params="nvme", nvme_path=tmp_path)

    def passing(stage: int, offload: OffloadConfig) -> int:
        return streamed(Blocks(), settings(stage, zero=ZeroConfig(offload=offload)), world=2)

    # Masters and two moments of the block of 2048, of one vector and of the next.
    assert passing(0, optimizer) == 2 * 3 * 4 * 2048
    assert passing(1, optimizer) == 2 * 3 * 4 * 1024
    # Halves of 1024, 2048 and 256 weights in fp32, two buffers of each.
    assert passing(3, weights) == 2 * 4 * (512 + 1024 + 128)
    assert passing(3, OffloadConfig()) == 0


def test_frozen_weights_take_their_own_bytes_alone() -> None:
    prediction = predict(Blocks().requires_grad_(False), settings(0), world=2)

    assert [prediction[kind] for kind in HELD] == [4 * 3328, 0, 0]


def test_the_vocabulary_of_the_test_models_makes_odd_sizes() -> None:
    assert VOCAB % 16 != 0
