"""The sampler's definition, compared with hand-computed numbers and the generation engine."""

from typing import Any

import pytest
import torch

from inference.engine.sampling import Sampler
from pipeline.kernels.sampling import Draw, filter_weights, reference_sample

HALVES = torch.tensor([[0.5, 0.125, 0.25, 0.125]]).double()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"top_k": 2}, [0.5, 0, 0.25, 0]),
        ({"top_k": 3}, [0.5, 0.125, 0.25, 0.125]),  # the fourth is as likely as the third
        ({"top_p": 0.75}, [0.5, 0, 0.25, 0]),
        ({"top_p": 0.76}, [0.5, 0.125, 0.25, 0]),  # the first of two equal ones
        ({"top_k": 2, "top_p": 0.6}, [0.5, 0, 0, 0]),  # 0.6 of 0.75 is less than 0.5
        ({"min_p": 0.5}, [0.5, 0, 0.25, 0]),
    ],
)
def test_truncation_keeps_the_likeliest_tokens(
    settings: dict[str, Any], expected: list[float]
) -> None:
    assert filter_weights(HALVES, Draw(seed=0, temperature=1.0, **settings)).tolist() == [expected]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_tokens_match_those_of_the_generation_engine(settings: dict[str, Any]) -> None:
    logits = 3 * torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    keys, positions = list(range(200)), [row % 7 for row in range(200)]

    tokens, logprobs = reference_sample(
        logits, torch.tensor(keys), torch.tensor(positions), Draw(seed=3, **settings)
    )
    expected = Sampler(seed=3, **settings)(logits, keys, positions)

    assert tokens.tolist() == expected[0]
    assert logprobs.tolist() == pytest.approx(expected[1], abs=2e-6)
