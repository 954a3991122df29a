"""In deterministic mode the number of processes may change whenever the job starts again."""

import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from pipeline.config import StepConfig
from pipeline.config.model import ZeroConfig
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from tests.faults.jobs import Command, assert_same_end, free_port, run_forked, small, step_words
from tests.test_resume import read_metrics

STEPS = 6


def deterministic(start: Path, step: str, out: Path) -> StepConfig:
    """Accumulation, warm-up, loss scale, stage 3; no dropout, whose masks a process draws."""
    config = small(start, step, output_dir=out, max_steps=STEPS)
    zero = ZeroConfig(reduction="deterministic")
    return replace(config, model=replace(config.model, lora=None, zero=zero))


@pytest.mark.faults
@pytest.mark.parametrize("step", ["sft", "reward"])
def test_one_two_and_four_processes_do_the_same(step: str, start: Path, tmp_path: Path) -> None:
    outs = {world_size: tmp_path / str(world_size) for world_size in (1, 2, 4)}
    for world_size, out in outs.items():
        codes = run_forked(deterministic(start, step, out), world_size=world_size)
        assert codes == [0] * world_size

    for out in outs.values():
        assert_same_end(out, outs[1], step=STEPS, elastic=True)


def agent(words: list[str], port: int, *, first: bool) -> Command:
    """Torchrun of one node of at most two, which notices a lost one within seconds."""
    fast = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return Command(
        *("-m", "pipeline.launch.torchrun", "--nnodes", "1:2", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={int(first)},{fast}"),
        *words,
    )


def worlds(out: Path) -> list[int]:
    """Numbers of processes that saved, one checkpoint after the other, repeats left out."""
    paths = sorted((out / "checkpoints").glob("step_*/manifest.json"))
    return [size for size, _ in groupby(Checkpoint.open(path.parent).world_size for path in paths)]


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_run_goes_on_when_a_node_is_lost_and_when_it_comes_back(
    start: Path, tmp_path: Path
) -> None:
    steps = 60
    config = replace(
        deterministic(start, "sft", tmp_path / "out"),
        max_steps=steps,
        batch_size=32,
        micro_batch_size=1,
        eval_every=0,
    )
    whole = replace(config, output_dir=tmp_path / "whole")
    out = config.output_dir
    assert run_forked(whole) == [0, 0]
    words = step_words(replace(config, resume=True), processes=None)
    port = free_port()

    def wait_for(sizes: list[int], job: Command) -> None:
        end = time.monotonic() + 120
        while worlds(out)[: len(sizes)] != sizes:
            assert time.monotonic() < end, job.output()
            assert job.process.poll() is None, job.output()
            time.sleep(0.1)

    with agent(words, port, first=True) as one:
        with agent(words, port, first=False) as other:
            wait_for([4], one)
            other.kill()
        wait_for([4, 2], one)
        with agent(words, port, first=False) as other:
            assert one.wait(240) == 0, one.output()
            assert other.wait(60) == 0, other.output()

    assert worlds(out) == [4, 2, 4]
    assert_same_end(out, tmp_path / "whole", step=steps, elastic=True)
    assert len(read_metrics(out)) == steps + 2
