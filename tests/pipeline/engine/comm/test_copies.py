"""Sharded copies of a model train to the bits of one that all processes share."""

from itertools import product
from pathlib import Path

import pytest

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import cut_mesh
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.checkpoint import test_state
from tests.pipeline.engine.test_invariance import digest
from tests.pipeline.engine.test_stages import STEPS, build, compute_loss, settings

Ended = tuple[str, list[float]]
"""Digest of the weights, and the gradient norms."""


def train(dtype: str, stage: int, *, copies: int, shared_memory: bool) -> Ended:
    """Two micro-batches on each process in each step, clipped."""
    with cut_mesh(replicas=copies, timeout_seconds=60.0):
        engine = Engine(
            build("llama", dtype),
            settings(stage, max_norm=0.5, shared_memory=shared_memory),
            total_steps=STEPS,
        )
        norms: list[float] = []
        for step in range(STEPS):
            for micro_batch in range(2):
                engine.backward(compute_loss(engine, step, micro_batch, rank()))
            norms.append(engine.step().grad_norm)
        return digest(test_state.weights(engine)), norms


def in_copies(copies: int, cases: list[tuple[str, int, bool]]) -> list[Ended]:
    return [
        train(dtype, stage, copies=copies, shared_memory=shared_memory)
        for dtype, stage, shared_memory in cases
    ]


SOME = [("fp32", 0, True), ("bf16", 1, False), ("bf16", 3, True), ("fp32", 3, False)]
ALL = list(product(("fp32", "bf16", "fp16"), range(4), (True, False)))


@pytest.mark.parametrize(
    ("cases", "several"),
    [
        pytest.param(SOME[1::2], (2,), id="two"),
        pytest.param(ALL, (2, 4), id="all", marks=pytest.mark.grid),
    ],
)
def test_any_number_of_copies_ends_in_the_bits_of_one(
    cases: list[tuple[str, int, bool]], several: tuple[int, ...]
) -> None:
    expected = run_ranks(in_copies, 1, cases, world_size=4)[0]

    assert len({norms[0] for _, norms in expected}) > 1
    for copies in several:
        for found in run_ranks(in_copies, copies, cases, world_size=4):
            assert found == expected


def save_in_copies(root: str, copies: int, stage: int) -> int:
    with cut_mesh(replicas=copies, timeout_seconds=60.0):
        engine = test_state.engine_at(stage)
        test_state.train(engine, range(2))
        test_state.save(engine, Path(root) / f"{copies} copies at stage {stage}")
        return sum(each.tensor.nbytes for each in test_state.trained_fragments(engine, "model"))


def go_on_in_copies(root: str, copies: int, stage: int, places: list[str]) -> list[Ended]:
    ended: list[Ended] = []
    with cut_mesh(replicas=copies, timeout_seconds=60.0):
        for place in places:
            engine = test_state.engine_at(stage)
            test_state.resume(engine, Path(root) / place)
            norms = test_state.train(engine, range(2, 4))
            ended.append((digest(test_state.weights(engine)), norms))
    return ended


@pytest.mark.jobs
def test_a_state_of_any_copies_goes_on_in_any_other_to_the_bit(tmp_path: Path) -> None:
    straight = test_state.engine_at(0)
    norms = test_state.train(straight, range(4))[2:]
    expected = digest(test_state.weights(straight)), norms
    written = run_ranks(save_in_copies, str(tmp_path), 2, 3, world_size=4)
    run_ranks(save_in_copies, str(tmp_path), 4, 1, world_size=4)
    run_ranks(save_in_copies, str(tmp_path), 1, 2, world_size=2)
    places = ["2 copies at stage 3", "4 copies at stage 1", "1 copies at stage 2"]

    for copies, stage, world in ((2, 1, 4), (1, 3, 2), (2, 3, 2)):
        for ended in run_ranks(
            go_on_in_copies, str(tmp_path), copies, stage, places, world_size=world
        ):
            assert ended == [expected] * len(places)

    # Every element is written once, by all processes about as many.
    state = Checkpoint.open(tmp_path / places[0] / "step_00000002")
    total = sum(state.numel(key) for key in sorted(state.keys()) if "/random" not in key)
    assert sum(written) == 4 * total
    assert max(written) < 1.5 * min(written)
