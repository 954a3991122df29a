"""Moments of AdamW in bf16: the same bits however vectors are cut and kept."""

from itertools import product
from pathlib import Path

import pytest

from pipeline.config import OptimConfig
from pipeline.config.model import OffloadConfig
from tests.distributed import run_ranks, world_size
from tests.pipeline.engine.checkpoint.test_state import engine_at, resume, save, train, weights
from tests.pipeline.engine.test_invariance import digest


def optim() -> OptimConfig:
    return OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=3, moments="bf16")


def digests() -> list[str]:
    """The weights after four steps, at every stage and with the optimizer offloaded."""
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    cases = [(stage, OffloadConfig()) for stage in range(4)]
    cases += [(2, OffloadConfig(optimizer="cpu")), (3, nvme)]
    ended: list[str] = []
    for stage, offload in cases:
        engine = engine_at(stage, optim=optim(), offload=offload)
        train(engine, range(4))
        ended.append(digest(weights(engine)))
    return ended


def test_every_stage_and_offload_ends_in_the_same_bits() -> None:
    for ended in run_ranks(digests):
        assert len(set(ended)) == 1


def save_in(root: str) -> None:
    """After two steps at stage 2, with the number of processes in its name."""
    engine = engine_at(2, optim=optim())
    train(engine, range(2))
    save(engine, Path(root) / str(world_size()))


def go_on(root: str) -> list[tuple[str, list[float]]]:
    """From each save, at two stages and with moments on a disk: weights and norms at the end."""
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    ended: list[tuple[str, list[float]]] = []
    for source, (stage, offload) in product((1, 2), ((0, OffloadConfig()), (3, nvme))):
        engine = engine_at(stage, optim=optim(), offload=offload)
        resume(engine, Path(root) / str(source))
        norms = train(engine, range(2, 4))
        ended.append((digest(weights(engine)), norms))
    return ended


@pytest.mark.jobs
def test_a_checkpoint_of_any_cut_goes_on_in_any_other(tmp_path: Path) -> None:
    for world in (1, 2):
        run_ranks(save_in, str(tmp_path), world_size=world)
    straight = engine_at(0, optim=optim())
    norms = train(straight, range(4))[2:]
    expected = digest(weights(straight)), norms

    for world in (1, 2):
        for ended in run_ranks(go_on, str(tmp_path), world_size=world):
            assert ended == [expected] * 4
