"""The exact norm hangs on the elements of a gradient, not on the vectors that they lie in."""

import math
from fractions import Fraction

import torch
from torch import Tensor

from pipeline.engine.exact_norm import BLOCK, largest_of, norm_of, rounded_squares, to_limbs


def gradient(count: int) -> Tensor:
    """Of all magnitudes, the smallest lost beside the largest."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=generator)
    return values * 10.0 ** torch.empty(count).uniform_(-12, 3, generator=generator)


def norm(vectors: list[Tensor]) -> float:
    """As an engine puts it together, each vector on a process of its own."""
    largest = max(largest_of(each) for each in vectors)
    limbs = [to_limbs(rounded_squares(each, largest)) for each in vectors]
    return norm_of(torch.tensor(limbs, dtype=torch.float64).sum(0).tolist(), largest)


def test_it_is_the_same_bits_however_the_elements_are_cut_and_ordered() -> None:
    values = gradient(2 * BLOCK + 1234)
    expected = norm([values])

    mixed = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    for cut in ([values], [mixed], mixed.split(999), [*values.split(BLOCK), torch.zeros(0)]):
        assert norm(list(cut)) == expected
    assert expected != norm([values[:BLOCK]])


def test_it_is_the_root_of_the_exact_sum_of_squares_but_for_the_last_bits() -> None:
    values = gradient(3000)
    exact = sum(Fraction(each) ** 2 for each in values.double().tolist())

    assert norm([values]) == math.sqrt(exact)
    assert norm([torch.tensor([3.0, 4.0])]) == 5.0
    tiny = torch.tensor([3e-40, 4e-40])
    assert norm([tiny]) == math.hypot(*tiny.tolist())
    assert norm([torch.full((1000,), 3e38)]) == math.sqrt(1000) * torch.tensor(3e38).item()
    assert norm([torch.zeros(5)]) == 0.0


def test_an_element_that_is_not_finite_is_seen() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        assert largest_of(torch.tensor([1.0, bad, 2.0])) == math.inf
    assert largest_of(torch.tensor([1.0, -3.0, 2.0])) == 3.0
