"""The test run holds every call to the shapes and dtypes of its annotations."""

import pytest
import torch
from jaxtyping import TypeCheckError

from step3_ppo.losses import whiten


def test_tensors_of_other_shapes_or_dtypes_are_refused() -> None:
    values, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    numbers = {"mean": 0.0, "variance": 1.0}
    assert whiten(values, mask, **numbers).shape == (2, 3)

    for wrong in ((values, mask[:, :2]), (values[0], mask), (values, values), (mask, mask)):
        with pytest.raises(TypeCheckError):
            whiten(*wrong, **numbers)
