"""Adam moments in bf16 give the same bits however vectors are sharded and stored."""

from pathlib import Path

from pipeline.config import OptimConfig
from pipeline.config.model import OffloadConfig
from tests.distributed import run_ranks
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


def test_checkpoint_resumes_with_moments_in_memory_or_on_disk(tmp_path: Path) -> None:
    engine = engine_at(2, optim=make_optim())
    train(engine, range(2))
    save(engine, tmp_path)
    expected = train(engine, range(2, 4)), digest(weights(engine))
    nvme = OffloadConfig(optimizer="nvme", nvme_path=tmp_path)

    for stage, offload in ((0, OffloadConfig()), (3, nvme)):
        resumed = engine_at(stage, optim=make_optim(), offload=offload)
        resume(resumed, tmp_path)
        assert (train(resumed, range(2, 4)), digest(weights(resumed))) == expected
