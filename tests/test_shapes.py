"""The test run checks calls against the shapes and dtypes of annotations."""

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError

from step3_ppo.losses import whiten
from tests.shapes import CHECK_EVERY, CHECKED_CALLS, check_shapes


def test_calls_with_other_shapes_or_dtypes_raise_type_check_errors() -> None:
    values, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    numbers = {"mean": 0.0, "variance": 1.0}
    assert whiten(values, mask, **numbers).shape == (2, 3)
    fresh = check_shapes(whiten.__wrapped__, typechecker=beartype)

    for wrong in ((values, mask[:, :2]), (values[0], mask), (values, values), (mask, mask)):
        with pytest.raises(TypeCheckError):
            fresh(*wrong, **numbers)


def test_later_calls_are_sampled() -> None:
    values = torch.ones(2, 3)
    fresh = check_shapes(whiten.__wrapped__, typechecker=beartype)

    refused = 0
    for _ in range(CHECKED_CALLS + 2 * CHECK_EVERY):
        try:
            fresh(values, values, mean=0.0, variance=1.0)
        except TypeCheckError:
            refused += 1

    assert refused == CHECKED_CALLS + 2
