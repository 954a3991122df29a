"""The sampler's definition, compared with hand-computed numbers."""

from typing import Any

import pytest
import torch

from inference.engine.sampling import Sampler

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
    kept = Sampler(seed=0, temperature=1.0, **settings).truncate(HALVES)

    assert (kept / kept.max()).tolist() == [[value / 0.5 for value in expected]]
