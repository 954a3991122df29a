"""The sampler: the kernel's own source, run on the CPU, against float64."""

import pytest
import torch

from inference.engine.sampling import Sampler
from pipeline.kernels.sampling import Draw, launch
from tests.pipeline.kernels.emulator.emulated import Emulator

CPU = torch.device("cpu")


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
        tokens, logprobs = launch(
            logits,
            numbers[0],
            numbers[1],
            Draw(seed=5, **settings),  # pyright: ignore[reportArgumentType]
            gpu=emulator.gpu(),
        )

    assert tokens.tolist() == expected[0]
    assert logprobs.tolist() == pytest.approx(expected[1], abs=2e-6)
