"""Bytes counted on tensors without memory are those of a run."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.memory import peak_bytes_of
from pipeline.budget.activation_profiler import (
    ActivationProfiler,
    PassBytes,
    measure_pass,
    profiled,
)
from pipeline.budget.passes import Pass, Rows, pass_bytes
from pipeline.config import TrainedModelConfig
from pipeline.data.batches import TokenBatch
from pipeline.models.attention import RAGGED
from pipeline.models.forward import Policy
from pipeline.models.trained import prepared
from tests.families import FAMILIES, SCALED, tiny_causal_lm, tiny_config

KIB = 1024


def meta_linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta")


def test_a_chain_of_products_keeps_what_hand_counting_says() -> None:
    # 64 rows: x of 16 in, 32 after the first product and the ReLU, 8 after the second; fp32.
    first, second = meta_linear(16, 32), meta_linear(32, 8)
    model = nn.Sequential(first, nn.ReLU(), second)
    x = torch.empty(64, 16, device="meta")

    taken = measure_pass(model, lambda: model(x).sum(), first=first, last=second, trains=True)

    # ReLU keeps its result; its argument goes when ReLU is done: 64 * (32 + 8) floats.
    assert taken.kept == 64 * (32 + 8) * 4
    # The highest moment: ReLU's result, its gradient, the matrix's gradient.
    assert taken.peak > taken.kept


def test_what_is_gone_is_not_counted() -> None:
    with ActivationProfiler() as profiler:
        a = torch.empty(KIB, device="meta")
        b = a + 1
        assert profiler.held == 8 * KIB
        view = b[:1]
        del b
        assert profiler.held == 8 * KIB  # the view holds the storage
        del view
        assert profiler.held == 4 * KIB
    assert (profiler.held, profiler.peak) == (4 * KIB, 8 * KIB)


def test_weights_and_their_gradients_are_not_counted() -> None:
    model = meta_linear(64, 64)
    model.weight.grad = torch.empty_like(model.weight)

    with profiled(model) as profiler:
        model.weight.grad.add_(model.weight)

    assert profiler.peak == 0


def test_logits_that_processes_put_together_count_as_a_products() -> None:
    hidden, rows = torch.empty(4, 8, device="meta"), torch.empty(16, 8, device="meta")

    with ActivationProfiler():
        own = hidden @ rows.t()
        joined = torch.cat([own, torch.empty_like(own)], dim=-1)
        whole = hidden @ torch.cat([rows, rows]).t()

        assert torch.equal(joined, whole)
        assert not torch.equal(torch.cat([own, own * 2], dim=-1), whole)
        assert not torch.equal(joined.tanh(), whole)


def test_attention_keeps_its_inputs_its_output_and_a_number_a_row() -> None:
    shape = (2, 4, 128, 16)  # 64 KiB in fp32
    query, key, value = (torch.empty(shape, device="meta", requires_grad=True) for _ in range(3))

    with profiled(nn.Identity()) as profiler:
        profiler.ignore([query, key, value])
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert profiler.held == 64 * KIB + 2 * 4 * 128 * 4
        out.sum().backward()
    assert (
        profiler.peak == 4 * 64 * KIB + 2 * 4 * 128 * 4 + 8
    )  # three gradients; the sum and its own


def test_the_tail_is_what_is_left_when_the_first_block_is_reached() -> None:
    blocks = nn.Sequential(*(meta_linear(256, 256) for _ in range(4)))
    x = torch.empty(256, 256, device="meta")
    size = 256 * 256 * 4

    taken = measure_pass(
        blocks, lambda: blocks(x).sum(), first=blocks[0], last=blocks[-1], trains=True
    )

    assert taken.kept == 4 * size  # the last one is the result
    assert taken.tail < taken.peak
    assert taken.tail == 2 * size + 8  # of the block's output and of its matrix; of the sum


LENGTH = 200
"""Tokens of a sequence."""

MODELS = ("opt", "gpt2", "llama", "qwen3")
SIZES = {
    "opt": {"hidden_size": 192, "word_embed_proj_dim": 192, "ffn_dim": 768},
    "gpt2": {"n_embd": 192, "n_layer": 4},
    "llama": {"hidden_size": 192, "intermediate_size": 512},
    "qwen3": {"hidden_size": 192, "intermediate_size": 512, "head_dim": 48},
}


WITHOUT_DROPOUT = dict.fromkeys(("dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)


def larger(family: str, **changes: object) -> dict[str, object]:
    layers = {} if family == "gpt2" else {"num_hidden_layers": 4}
    context = {"n_positions" if family == "gpt2" else "max_position_embeddings": 256}
    return {**SIZES[family], **layers, **context, **WITHOUT_DROPOUT, "vocab_size": 1000, **changes}


PASSES = [
    # Each family, each dtype and each way of checkpointing; the others are the grid.
    pytest.param(family, dtype, every, marks=() if number % 4 == row else pytest.mark.grid)
    for row, family in enumerate(MODELS)
    for number, (dtype, every) in enumerate(
        itertools.product((torch.float32, torch.bfloat16), (None, 1))
    )
]


@pytest.mark.jobs
@pytest.mark.parametrize(("family", "dtype", "checkpoint_every"), PASSES)
def test_a_real_pass_takes_what_was_counted(
    family: str, dtype: torch.dtype, checkpoint_every: int | None
) -> None:
    rows = Rows(2, LENGTH, LENGTH - 1)
    how = Pass(rows, "train", uniform=True, checkpoint_every=checkpoint_every)
    with torch.device("meta"):
        empty = tiny_causal_lm_on_meta(family, dtype)
    counted = pass_bytes(empty, how)

    model = tiny_causal_lm(family, **larger(family))
    nn.Module.to(model, dtype)
    model.set_attn_implementation(RAGGED)
    prepared(model, TrainedModelConfig(gradient_checkpointing=checkpoint_every is not None))
    for param in model.parameters():
        param.grad_dtype = torch.float32  # pyright: ignore[reportAttributeAccessIssue]
        param.grad = torch.zeros_like(param, dtype=torch.float32)
    policy = Policy(model)
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    targets = torch.arange(ids.numel()).view_as(ids)[:, 1:].flatten()
    batch = TokenBatch(ids.flatten(), (LENGTH, LENGTH), targets)

    def run() -> Tensor:
        return policy(batch, uniform=True).logprobs.sum()

    run().backward()
    before = peak_bytes_of(lambda: None)

    measured = peak_bytes_of(lambda: run().backward()) - before

    assert counted.peak == pytest.approx(measured, rel=0.05)


def tiny_causal_lm_on_meta(family: str, dtype: torch.dtype) -> nn.Module:
    return AutoModelForCausalLM.from_config(tiny_config(family, **larger(family)), dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_followed_without_numbers(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)

    assert pass_bytes(model, Pass(Rows(2, 16, 15), "train")).peak > 0
    assert pass_bytes(model, Pass(Rows(2, 16, 15), "ask", entropy=True)).peak > 0


@pytest.mark.parametrize(("layers", "checkpoint_every"), [(5, None), (5, 1), (7, 2)])
def test_a_few_of_many_equal_blocks_are_enough(layers: int, checkpoint_every: int | None) -> None:
    """As many different ones are all run: the last has a bias of its own."""

    def counted(*, odd: bool) -> PassBytes:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                tiny_config("llama", num_hidden_layers=layers), dtype=torch.float32
            )
        if odd:
            model.model.layers[-1].register_parameter("odd", nn.Parameter(torch.empty(0)))
        return pass_bytes(model, Pass(Rows(2, 32, 31), "train", checkpoint_every=checkpoint_every))

    assert counted(odd=False) == counted(odd=True)


@pytest.mark.parametrize("family", ["llama", *SCALED])
def test_logits_that_a_family_scales_are_counted_whole(family: str) -> None:
    changes = {"vocab_size": 2**14}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, **changes, max_position_embeddings=2**13), dtype=torch.float32
        )
    logits = 2**13 * 2**14 * 4  # half a GiB, of which a tile is a sixteenth

    taken = pass_bytes(model, Pass(Rows(1, 2**13, 2**13 - 1), "ask"))

    assert (taken.peak > logits) == (family in SCALED)
