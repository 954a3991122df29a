"""However a step is cut, the host reads as many numbers of the device: each read waits for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from step3_ppo.train import train as train_ppo
from tests.reads import Reads
from tests.step1_sft.test_train import small_task as sft_task
from tests.step2_reward.test_train import small_task as reward_task
from tests.step3_ppo.test_every_method import make_config as ppo_method
from tests.step3_ppo.toy import save_models

Task = Callable[[Path, int], Any]
"""The settings of a step in a directory, with that many rows in a micro-batch."""

OF_THE_HOST = {
    "pipeline/data/batches.py: collate",
    "pipeline/models/forward/attention.py: _padded",
    "step3_ppo/experience.py: minibatch",
}
"""These read rows and lengths, which are always on the host."""


def _ppo(method: str) -> Task:
    def task(directory: Path, size: int) -> Any:
        save_models(directory)
        return ppo_method(method, directory, directory / "out", micro_batch_size=size, max_steps=1)

    return task


def _sft(directory: Path, size: int) -> Any:
    return sft_task(directory, micro_batch_size=size, max_steps=2)


def _reward(directory: Path, size: int) -> Any:
    return reward_task(directory, micro_batch_size=size, max_steps=2)


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("train", "task", "within", "updates"),
    [
        pytest.param(train_sft, _sft, "learn_from", 2, id="sft"),
        pytest.param(train_reward, _reward, "learn", 2, id="reward"),
        pytest.param(train_ppo, _ppo("ppo"), "update_policy", 4, id="ppo", marks=pytest.mark.grid),
    ],
)
def test_more_micro_batches_have_the_host_wait_no_more_often(
    train: Callable[[Any], object], task: Task, within: str, updates: int, tmp_path: Path
) -> None:
    counts: list[dict[str, int]] = []
    for size in (8, 2):
        directory = tmp_path / str(size)
        directory.mkdir()
        with Reads(within) as found:
            train(task(directory, size))
        counts.append(found.counts)

    few, many = counts
    more = {place for place in many if many[place] > few.get(place, 0)}
    assert "pipeline/data/batches.py: collate" in more  # there were more of them
    assert more - OF_THE_HOST == set()
    assert few["pipeline/engine/engine.py: _grad_norm"] == updates
