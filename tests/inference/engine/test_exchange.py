"""Prompts of processes that generate together."""

from inference.generation import gather_prompts
from pipeline.parallel.mesh import cut_mesh
from tests.distributed import rank, run_ranks

SHARED = ((5, 6), 10)
"""A prompt that both processes have under one key."""


def exchanged() -> tuple[list[tuple[tuple[int, ...], int]], list[list[int]]]:
    own = [((7 + rank(),), 11), SHARED, SHARED]
    with cut_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
        return gather_prompts(own, mesh.tensor.apart)


def test_a_prompt_that_several_have_is_answered_once_and_one_that_comes_twice_twice() -> None:
    first, second = run_ranks(exchanged)

    prompts = [((7,), 11), SHARED, SHARED, ((8,), 11)]
    assert first == (prompts, [[0], [1], [2], []])
    assert second == (prompts, [[], [1], [2], [0]])
