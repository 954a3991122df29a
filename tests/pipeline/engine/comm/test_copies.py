"""Training with several sharded copies of a model matches training with one bitwise."""

from itertools import product
from pathlib import Path

import pytest

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import split_mesh
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.checkpoint import test_state
from tests.pipeline.engine.test_invariance import digest
from tests.pipeline.engine.test_stages import STEPS, build, compute_loss, settings

Result = tuple[str, list[float]]
"""Digest of the weights, and the gradient norms."""


def train(dtype: str, stage: int, *, copies: int) -> Result:
    """Train on two micro-batches per process and step, with clipping."""
    with split_mesh(replicas=copies, timeout_seconds=60.0):
        engine = Engine(build("llama", dtype), settings(stage, max_norm=0.5), total_steps=STEPS)
        norms: list[float] = []
        for step in range(STEPS):
            for micro_batch in range(2):
                engine.backward(compute_loss(engine, step, micro_batch, rank()))
            norms.append(engine.step().grad_norm)
        return digest(test_state.weights(engine)), norms


def train_copies(copies: int, cases: list[tuple[str, int]]) -> list[Result]:
    return [train(dtype, stage, copies=copies) for dtype, stage in cases]


ALL = list(product(("fp32", "bf16", "fp16"), range(4)))


@pytest.mark.parametrize(
    ("cases", "copy_counts"),
    [
        pytest.param([("bf16", 1), ("fp32", 3)], (2,), id="two"),
        pytest.param(ALL, (2, 4), id="all", marks=pytest.mark.grid),
    ],
)
def test_any_number_of_copies_matches_one_copy_bitwise(
    cases: list[tuple[str, int]], copy_counts: tuple[int, ...]
) -> None:
    expected = run_ranks(train_copies, 1, cases, world_size=4)[0]

    assert len({norms[0] for _, norms in expected}) > 1
    for copies in copy_counts:
        for results in run_ranks(train_copies, copies, cases, world_size=4):
            assert results == expected


def save_copies(root: str, copies: int, stage: int) -> int:
    with split_mesh(replicas=copies, timeout_seconds=60.0):
        engine = test_state.engine_at(stage)
        test_state.train(engine, range(2))
        test_state.save(engine, Path(root) / f"{copies} copies at stage {stage}")
        fragments = test_state.trained_fragments(engine, "model")
        return sum(fragment.tensor.nbytes for fragment in fragments)


def resume_copies(root: str, copies: int, stage: int, directories: list[str]) -> list[Result]:
    results: list[Result] = []
    with split_mesh(replicas=copies, timeout_seconds=60.0):
        for directory in directories:
            engine = test_state.engine_at(stage)
            test_state.resume(engine, Path(root) / directory)
            norms = test_state.train(engine, range(2, 4))
            results.append((digest(test_state.weights(engine)), norms))
    return results


@pytest.mark.jobs
def test_checkpoint_resumes_with_any_number_of_copies_bitwise(tmp_path: Path) -> None:
    uninterrupted = test_state.engine_at(0)
    norms = test_state.train(uninterrupted, range(4))[2:]
    expected = digest(test_state.weights(uninterrupted)), norms
    written = run_ranks(save_copies, str(tmp_path), 2, 3, world_size=4)
    run_ranks(save_copies, str(tmp_path), 4, 1, world_size=4)
    run_ranks(save_copies, str(tmp_path), 1, 2, world_size=2)
    directories = ["2 copies at stage 3", "4 copies at stage 1", "1 copies at stage 2"]

    for copies, stage, world in ((2, 1, 4), (1, 3, 2), (2, 3, 2)):
        for results in run_ranks(
            resume_copies, str(tmp_path), copies, stage, directories, world_size=world
        ):
            assert results == [expected] * len(directories)

    # Every element is written once, and every process writes about as many.
    checkpoint = Checkpoint.open(tmp_path / directories[0] / "step_00000002")
    total = sum(checkpoint.numel(key) for key in sorted(checkpoint.keys()) if "/random" not in key)
    assert sum(written) == 4 * total
    assert max(written) < 1.5 * min(written)
