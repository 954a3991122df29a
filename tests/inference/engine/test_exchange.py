"""Gathering of prompts in tensor-parallel generation."""

from inference.generation import gather_prompts
from pipeline.parallel.mesh import split_mesh
from tests.distributed import rank, run_ranks

SHARED = ((5, 6), 10)
"""A prompt of both processes with the same key."""


def exchange() -> tuple[list[tuple[tuple[int, ...], int]], list[list[int]]]:
    prompts = [((7 + rank(),), 11), SHARED, SHARED]
    with split_mesh(replicas=1, tp=2, timeout_seconds=60.0) as mesh:
        return gather_prompts(prompts, mesh.tensor.untracked)


def test_shared_prompts_are_gathered_once_per_occurrence() -> None:
    first, second = run_ranks(exchange)

    prompts = [((7,), 11), SHARED, SHARED, ((8,), 11)]
    assert first == (prompts, [[0], [1], [2], []])
    assert second == (prompts, [[], [1], [2], [0]])
