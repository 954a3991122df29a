"""The sampler: the kernel's own source, run on the CPU, against float64."""

import math

import pytest
import torch

from inference.engine.sampling import Sampler
from pipeline.kernels.sampling import cuda
from pipeline.kernels.sampling.definition import Draw
from tests.pipeline.kernels.emulator.emulated import SCHEDULES, Emulator
from tests.pipeline.kernels.sampling.cases import QUICK, inputs_of, run

CPU = torch.device("cpu")


def test_the_order_of_threads_changes_no_bit(emulator: Emulator) -> None:
    inputs = inputs_of(QUICK[6], CPU)
    outs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for schedule in SCHEDULES:
        with emulator.memory(*inputs.tensors(), schedule=schedule):
            outs.append(run(QUICK[6], inputs, emulator.gpu()))

    for tokens, logprobs in outs[1:]:
        assert torch.equal(tokens, outs[0][0])
        assert torch.equal(logprobs, outs[0][1])


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}],
)
def test_tokens_are_those_of_the_generation_engine(
    settings: dict[str, float], emulator: Emulator
) -> None:
    logits = 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    keys, positions = list(range(100, 140)), [row % 7 for row in range(40)]
    expected = Sampler(seed=5, **settings)(logits, keys, positions)  # pyright: ignore[reportArgumentType]

    numbers = torch.tensor([keys, positions])
    with emulator.memory(logits, numbers):
        tokens, logprobs = cuda.sample(
            logits,
            numbers[0],
            numbers[1],
            Draw(seed=5, **settings),  # pyright: ignore[reportArgumentType]
            gpu=emulator.gpu(),
        )

    assert tokens.tolist() == expected[0]
    assert logprobs.tolist() == pytest.approx(expected[1], abs=2e-6)


@pytest.mark.parametrize(
    "row",
    [
        [math.nan, 1.0, 2.0],
        [math.inf, 1.0, 2.0],
        [math.inf, math.inf, 0.0],
        [-math.inf, -math.inf, -math.inf],
        [math.nan, math.nan, math.nan],
    ],
    ids=str,
)
@pytest.mark.parametrize("draw", [Draw(seed=0, temperature=1.0, top_k=2, top_p=0.9)], ids=["both"])
def test_a_row_that_is_no_distribution_gives_some_token_and_nan(
    row: list[float], draw: Draw, emulator: Emulator
) -> None:
    logits, numbers = torch.tensor([row]), torch.zeros(2, 1, dtype=torch.long)

    with emulator.memory(logits, numbers):
        tokens, logprobs = cuda.sample(logits, numbers[0], numbers[1], draw, gpu=emulator.gpu())

    assert 0 <= tokens.item() < 3
    assert logprobs.isnan().all()
