"""What a long run needs stays the same, and what grows is said."""

import gc
import json
import logging
import threading
from pathlib import Path

import psutil
import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import current_mesh
from pipeline.run import Run
from pipeline.watchdog.health import SETTLED, Health
from step1_sft.config import SFTConfig
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, loss_of, settings


def test_lines_of_metrics_have_the_memory_of_the_process(tmp_path: Path) -> None:
    with Run(SFTConfig(output_dir=tmp_path), name="run", total_steps=1, mesh=current_mesh()) as run:
        run.log(1, loss=1.0)

    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    if not torch.cuda.is_available():
        assert line["memory_gb"] == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.2)


def test_descriptors_that_are_not_closed_are_said_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    health = Health(current_mesh().world)
    health.look(SETTLED)
    health.look(SETTLED + 1)
    assert caplog.messages == []

    opened = [(tmp_path / str(n)).open("w") for n in range(20)]
    for step in range(20, 23):
        health.look(step)
    for file in opened:
        file.close()

    (message,) = caplog.messages
    assert message.endswith("after step 10: something isn't closed")
    assert "open files and" in message


def soak(steps: int, shared_memory: bool) -> dict[str, tuple[int, int]]:
    """Descriptors, threads and live tensors after a fifth of the steps and after all."""
    engine = Engine(
        build("llama", "bf16"),
        settings(3, max_norm=1.0, shared_memory=shared_memory),
        total_steps=steps,
    )
    seen: list[tuple[int, int, int]] = []
    for step in range(1, steps + 1):
        engine.backward(loss_of(engine, 0, 0, rank()))
        engine.step()
        if step in (steps // 5, steps):
            gc.collect()
            tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
            seen.append((psutil.Process().num_fds(), threading.active_count(), tensors))
    kinds = ("descriptors", "threads", "tensors")
    return {kind: (early, late) for kind, early, late in zip(kinds, *seen, strict=True)}


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("steps", "shared_memory"),
    [
        (150, True),
        pytest.param(1000, True, marks=pytest.mark.faults),
        pytest.param(1000, False, marks=pytest.mark.faults),
    ],
)
def test_hundreds_of_steps_need_no_more_than_the_first_ones(
    steps: int, shared_memory: bool
) -> None:
    for seen in run_ranks(soak, steps, shared_memory):
        assert all(late <= early for early, late in seen.values()), seen
