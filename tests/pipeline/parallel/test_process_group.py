"""Which GPU a process takes."""

import pytest

from pipeline.errors import ConfigError
from pipeline.parallel.process_group import gpu_of


def test_each_process_of_a_machine_has_its_own_gpu() -> None:
    assert [gpu_of(local_rank, 4) for local_rank in range(4)] == [0, 1, 2, 3]


def test_a_process_that_is_shown_one_gpu_takes_it() -> None:
    assert [gpu_of(local_rank, 1) for local_rank in range(4)] == [0, 0, 0, 0]


def test_a_process_too_many_is_told() -> None:
    with pytest.raises(ConfigError, match="process 3 has no GPU: 2 are visible"):
        gpu_of(2, 2)
