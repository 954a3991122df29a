"""Calls in tests are checked against the annotated shapes and dtypes."""

import pytest
import torch
from jaxtyping import TypeCheckError

from step3_ppo.losses import whiten


def test_tensors_of_wrong_shape_or_dtype_are_rejected() -> None:
    values, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    statistics = {"mean": 0.0, "variance": 1.0}
    assert whiten(values, mask, **statistics).shape == (2, 3)

    for wrong in ((values, mask[:, :2]), (values[0], mask), (values, values), (mask, mask)):
        with pytest.raises(TypeCheckError):
            whiten(*wrong, **statistics)
