"""However a step is cut, the host reads as many numbers of the device: each read waits for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from tests.reads import Reads
from tests.step1_sft.test_train import small_task as sft_task
from tests.step2_reward.test_train import small_task as reward_task

OF_THE_HOST = {
    "pipeline/data/batches.py: collate",
    "pipeline/models/forward/attention.py: _padded",
}
"""These read rows and lengths, which are always on the host."""


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("train", "task", "within"),
    [
        pytest.param(train_sft, sft_task, "learn_from", id="sft"),
        pytest.param(train_reward, reward_task, "learn", id="reward", marks=pytest.mark.grid),
    ],
)
def test_more_micro_batches_have_the_host_wait_no_more_often(
    train: Callable[..., object], task: Callable[..., Any], within: str, tmp_path: Path
) -> None:
    counts: list[dict[str, int]] = []
    for size in (8, 2):
        (directory := tmp_path / str(size)).mkdir()
        with Reads(within) as found:
            train(task(directory, micro_batch_size=size, max_steps=2))
        counts.append(found.counts)

    few, many = counts
    more = {place for place in many if many[place] > few.get(place, 0)}
    assert "pipeline/data/batches.py: collate" in more  # there were more of them
    assert more - OF_THE_HOST == set()
    assert few["pipeline/engine/engine.py: _grad_norm"] == 2
