"""Every generator goes on where its state was taken."""

import random

import numpy as np
import torch

from pipeline.random_state import random_state, seed_generators, set_random_state


def drawn() -> tuple[object, ...]:
    return (
        torch.rand(5).tolist(),
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(4).tolist(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
    )


def test_half_of_a_gaussian_pair_is_part_of_the_state() -> None:
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    state = random_state()
    first = (random.gauss(0, 1), np.random.randn())  # noqa: NPY002

    set_random_state(state)

    assert (random.gauss(0, 1), np.random.randn()) == first  # noqa: NPY002


def test_a_seed_decides_what_is_drawn() -> None:
    seed_generators(7)
    first = drawn()
    drawn()

    seed_generators(7)

    assert drawn() == first
