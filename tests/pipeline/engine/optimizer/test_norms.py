"""The norm's bits depend on nothing but the numbers."""

import math

import pytest
import torch

from pipeline.engine.optimizer.gradients import squared_norms


@pytest.mark.parametrize("rows", [1, 16])
def test_neither_the_number_of_threads_nor_of_rows_changes_a_bit(rows: int) -> None:
    values = torch.randn(rows * 150_000, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            found.append(squared_norms(values, rows).tolist())
    finally:
        torch.set_num_threads(threads)
    one_by_one = [squared_norms(row, 1).item() for row in values.view(rows, -1)]

    assert found == [one_by_one] * 3


def test_the_sum_is_fp64s() -> None:
    values = torch.tensor([1e19, 1.0, 1e-19] * 16)  # whose squares fp32 can't hold

    total = math.fsum(squared_norms(values, 16).tolist())

    exact = [value.item() ** 2 for value in values]
    assert total == pytest.approx(math.fsum(exact), rel=1e-15)
