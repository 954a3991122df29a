"""The number of device-to-host reads, which synchronize, doesn't depend on the micro-batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from tests.reads import DeviceReads
from tests.step1_sft.test_train import small_task as sft_task
from tests.step2_reward.test_train import small_task as reward_task

HOST_ONLY = {"pipeline/data/batches.py: collate", "pipeline/models/forward/attention.py: _padded"}
"""Functions that read rows and lengths, which are always on the host."""


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("train", "task", "within"),
    [
        pytest.param(train_sft, sft_task, "take_step", id="sft"),
        pytest.param(train_reward, reward_task, "take_step", id="reward", marks=pytest.mark.grid),
    ],
)
def test_more_micro_batches_cause_no_more_device_reads(
    train: Callable[..., object], task: Callable[..., Any], within: str, tmp_path: Path
) -> None:
    counts: list[dict[str, int]] = []
    for size in (8, 2):
        (directory := tmp_path / str(size)).mkdir()
        with DeviceReads(within) as reads:
            train(task(directory, micro_batch_size=size, max_steps=2))
        counts.append(reads.counts)

    few, many = counts
    increased = {name for name in many if many[name] > few.get(name, 0)}
    assert "pipeline/data/batches.py: collate" in increased  # there are more micro-batches
    assert increased - HOST_ONLY == set()
    assert few["pipeline/engine/engine.py: _grad_norm"] == 2
