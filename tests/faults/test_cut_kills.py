"""Jobs whose models are cut, killed at random instants and continued in other cuts, end as one.

Stages of a pipeline, layers that two processes compute together, both, and replicas of shards:
after each kill of a process by SIGKILL the job goes on in a cut that is drawn, with its own number
of processes. Every process of every cut is killed at least once.
"""

import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from pipeline.config import ParallelConfig
from pipeline.config.zero import ZeroConfig
from step1_sft.config import SFTConfig
from tests.faults.jobs import Forked, assert_same_end, run_forked, small

STEPS = 12
MOST_KILLS = 5
"""Of a run."""

PATIENCE_SECONDS = 120
"""For a job to end: the machine may be busy."""

Cut = tuple[int, Literal[0, 1, 2, 3], ParallelConfig]
"""Processes, ZeRO stage and how they are divided."""

WHOLE: dict[str, Cut] = {
    "pp 2": (2, 1, ParallelConfig(pp=2)),
    "pp 2 x shards 2": (4, 2, ParallelConfig(pp=2)),
    "pp 2 x replicas 2": (4, 1, ParallelConfig(pp=2, replicas=2, schedule="gpipe")),
    "replicas 2 x shards 2": (4, 3, ParallelConfig(replicas=2)),
}
"""Cuts that leave layers whole: the bits are those of one process."""

DIVIDED: dict[str, Cut] = {
    "tp 2": (2, 0, ParallelConfig(tp=2)),
    "pp 2 x tp 2": (4, 1, ParallelConfig(pp=2, tp=2)),
    "tp 2 x shards 2": (4, 3, ParallelConfig(tp=2)),
}
"""Cuts of layers into two parts, which round differently, and alike among themselves."""


def job(start: Path, out: Path, cut: Cut) -> SFTConfig:
    """Accumulation, warm-up, loss scale, evaluations and a save after each step."""
    _, stage, parallel = cut
    config = small(start, "sft", output_dir=out, max_steps=STEPS)
    zero = ZeroConfig(reduction="deterministic")
    model = replace(config.model, lora=None, zero=zero, zero_stage=stage)
    return replace(config, model=model, parallel=parallel)


def killed(config: SFTConfig, processes: int, victim: int, seconds: float) -> bool:
    """Start the job and kill one process of it at an instant; whether it was still at work."""
    with Forked(config, world_size=processes) as started:
        time.sleep(seconds)
        process = started.processes[victim]
        process.kill()
        codes = started.wait(PATIENCE_SECONDS)
    return codes[victim] == -9


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("cuts", "kills"),
    [
        pytest.param({"pp 2": WHOLE["pp 2"]}, 2, id="pp 2, 2"),
        pytest.param(WHOLE, 18, id="whole layers, 18", marks=pytest.mark.faults),
        pytest.param(DIVIDED, 14, id="divided layers, 14", marks=pytest.mark.faults),
    ],
)
@pytest.mark.timeout(2400)
def test_killed_in_any_part_a_job_goes_on_in_another_cut_and_ends_in_the_same_bits(
    cuts: dict[str, Cut], kills: int, start: Path, tmp_path: Path
) -> None:
    reference, first = tmp_path / "reference", next(iter(cuts.values()))
    short = replace(job(start, tmp_path / "first", first), max_steps=1)
    assert run_forked(short, world_size=first[0]) == [0] * first[0]  # the slowest start of all
    began = time.monotonic()
    assert run_forked(job(start, reference, first), world_size=first[0]) == [0] * first[0]
    seconds = time.monotonic() - began
    draw, number = random.Random(kills), 0
    left = {(name, rank) for name, cut in cuts.items() for rank in range(cut[0])}
    hit = Counter[str]()

    while hit.total() < kills or left:
        out = tmp_path / f"run {number}"
        number += 1
        for _ in range(MOST_KILLS):
            name, rank = draw.choice(sorted(left or {(each, 0) for each in cuts}))
            config = replace(job(start, out, cuts[name]), resume=out.exists())
            processes = cuts[name][0]
            instant = draw.uniform(0.2, 1) * seconds
            if not killed(config, processes, rank, instant):
                break
            hit[name] += 1
            left.discard((name, rank))
        name = draw.choice(sorted(cuts))
        last = replace(job(start, out, cuts[name]), resume=True)
        if not (out / "result.json").exists():
            assert run_forked(last, world_size=cuts[name][0]) == [0] * cuts[name][0]
        assert_same_end(out, reference, step=STEPS, elastic=True)

    assert set(hit) == set(cuts)
