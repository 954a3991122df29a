"""In deterministic mode the number of processes may change whenever the job starts again."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import StepConfig
from pipeline.engine.config import ZeroConfig
from tests.faults.jobs import assert_same_end, run_forked, small

STEPS = 6


def deterministic(start: Path, step: str, out: Path) -> StepConfig:
    """Accumulation, warm-up, loss scale, stage 3; no dropout, whose masks a process draws."""
    config = small(start, step, output_dir=out, max_steps=STEPS)
    zero = ZeroConfig(reduction="deterministic")
    return replace(config, model=replace(config.model, lora=None, zero=zero))


@pytest.mark.parametrize("step", ["sft", pytest.param("reward", marks=pytest.mark.faults)])
def test_one_two_and_four_processes_do_the_same(step: str, start: Path, tmp_path: Path) -> None:
    outs = {world_size: tmp_path / str(world_size) for world_size in (1, 2, 4)}
    for world_size, out in outs.items():
        codes = run_forked(deterministic(start, step, out), world_size=world_size)
        assert codes == [0] * world_size

    for out in outs.values():
        assert_same_end(out, outs[1], step=STEPS, elastic=True)
