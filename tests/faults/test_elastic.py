"""In deterministic mode a restart may change the number of processes."""

import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from pipeline.config import StepConfig
from pipeline.config.model import ZeroConfig
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from tests.faults.jobs import Command, assert_same_end, free_port, run_forked, small_job, step_args
from tests.test_resume import read_metrics

STEPS = 6


def deterministic_config(inputs: Path, step: str, out: Path) -> StepConfig:
    """Return settings with accumulation, warm-up, loss scale and stage 3, but no dropout."""
    config = small_job(inputs, step, output_dir=out, max_steps=STEPS)
    zero = ZeroConfig(reduction="deterministic")
    return replace(config, model=replace(config.model, lora=None, zero=zero))


@pytest.mark.faults
@pytest.mark.parametrize("step", ["sft", "reward"])
def test_training_is_bitwise_equal_on_1_2_and_4_ranks(
    step: str, inputs: Path, tmp_path: Path
) -> None:
    outs = {world_size: tmp_path / str(world_size) for world_size in (1, 2, 4)}
    for world_size, out in outs.items():
        codes = run_forked(deterministic_config(inputs, step, out), world_size=world_size)
        assert codes == [0] * world_size

    for out in outs.values():
        assert_same_end(out, outs[1], step=STEPS, elastic=True)


def start_node(command: list[str], port: int, *, first: bool) -> Command:
    """Start torchrun on one of at most two nodes; it notices a lost node within seconds."""
    conf = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return Command(
        *("-m", "pipeline.launch.torchrun", "--nnodes", "1:2", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={int(first)},{conf}"),
        *command,
    )


def saved_world_sizes(out: Path) -> list[int]:
    """Return the world sizes of successive checkpoints, without repetitions."""
    paths = sorted((out / "checkpoints").glob("step_*/manifest.json"))
    return [size for size, _ in groupby(Checkpoint.open(path.parent).world_size for path in paths)]


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_run_continues_when_a_node_leaves_and_returns(inputs: Path, tmp_path: Path) -> None:
    steps = 60
    config = replace(
        deterministic_config(inputs, "sft", tmp_path / "out"),
        max_steps=steps,
        batch_size=32,
        micro_batch_size=1,
        eval_every=0,
    )
    reference = replace(config, output_dir=tmp_path / "whole")
    out = config.output_dir
    assert run_forked(reference) == [0, 0]
    command = step_args(replace(config, resume=True), processes=None)
    port = free_port()

    def wait_for(sizes: list[int], job: Command) -> None:
        deadline = time.monotonic() + 120
        while saved_world_sizes(out)[: len(sizes)] != sizes:
            assert time.monotonic() < deadline, job.output()
            assert job.process.poll() is None, job.output()
            time.sleep(0.1)

    with start_node(command, port, first=True) as first_node:
        with start_node(command, port, first=False) as second_node:
            wait_for([4], first_node)
            second_node.kill()
        wait_for([4, 2], first_node)
        with start_node(command, port, first=False) as second_node:
            assert first_node.wait(240) == 0, first_node.output()
            assert second_node.wait(60) == 0, second_node.output()

    assert saved_world_sizes(out) == [4, 2, 4]
    assert_same_end(out, tmp_path / "whole", step=steps, elastic=True)
    assert len(read_metrics(out)) == steps + 2
