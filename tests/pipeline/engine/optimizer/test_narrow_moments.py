"""Adam moments in bf16 give the same bits however vectors are sharded and stored."""

from itertools import product
from pathlib import Path

import pytest

from pipeline.config import OptimConfig
from pipeline.config.model import OffloadConfig
from tests.distributed import run_ranks, world_size
from tests.pipeline.engine.checkpoint.test_state import engine_at, resume, save, train, weights
from tests.pipeline.engine.test_invariance import digest


def make_optim() -> OptimConfig:
    return OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=3, moments="bf16")


def digests() -> list[str]:
    """Return digests of the weights after four steps, at every stage and with offloading."""
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    cases = [(stage, OffloadConfig()) for stage in range(4)]
    cases += [(2, OffloadConfig(optimizer="cpu")), (3, nvme)]
    results: list[str] = []
    for stage, offload in cases:
        engine = engine_at(stage, optim=make_optim(), offload=offload)
        train(engine, range(4))
        results.append(digest(weights(engine)))
    return results


def test_every_stage_and_offload_gives_the_same_bits() -> None:
    for results in run_ranks(digests):
        assert len(set(results)) == 1


def save_checkpoint(root: str) -> None:
    """Save after two steps at stage 2, in a directory named by the number of processes."""
    engine = engine_at(2, optim=make_optim())
    train(engine, range(2))
    save(engine, Path(root) / str(world_size()))


def resume_checkpoints(root: str) -> list[tuple[str, list[float]]]:
    """Resume each save at two stages, once with moments on disk; return weights and norms."""
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    results: list[tuple[str, list[float]]] = []
    for source, (stage, offload) in product((1, 2), ((0, OffloadConfig()), (3, nvme))):
        engine = engine_at(stage, optim=make_optim(), offload=offload)
        resume(engine, Path(root) / str(source))
        norms = train(engine, range(2, 4))
        results.append((digest(weights(engine)), norms))
    return results


@pytest.mark.jobs
def test_checkpoint_resumes_with_any_sharding(tmp_path: Path) -> None:
    for world in (1, 2):
        run_ranks(save_checkpoint, str(tmp_path), world_size=world)
    uninterrupted = engine_at(0, optim=make_optim())
    norms = train(uninterrupted, range(4))[2:]
    expected = digest(weights(uninterrupted)), norms

    for world in (1, 2):
        for results in run_ranks(resume_checkpoints, str(tmp_path), world_size=world):
            assert results == [expected] * 4
