"""`--threads` of train.py is the setting of each step, unless a step has its own."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.local import PASSED_ON
from pipeline.plan.methods import side_by_side
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from tests.pipeline.stages import THREE_STEPS


def threads(*words: str, out: Path) -> list[int | None]:
    parsed = parse_request(["--output-dir", str(out), *words], THREE_STEPS)
    stages = side_by_side(THREE_STEPS, parsed.request.method)
    return [each.threads for each in step_configs(parsed, stages).values()]


def test_the_option_reaches_all_steps_and_a_steps_own_wins(tmp_path: Path) -> None:
    assert threads(out=tmp_path) == [None, None, None]
    assert threads("--threads", "3", out=tmp_path) == [3, 3, 3]
    assert threads("--threads", "3", "--reward.threads", "1", out=tmp_path) == [3, 1, 3]
    assert PASSED_ON.fullmatch("RLHF_THREADS")  # to other machines as well


def test_no_threads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--threads must be above 0, got 0"):
        threads("--threads", "0", out=tmp_path)
    with pytest.raises(ConfigError, match="threads must be above 0, got -1"):
        threads("--sft.threads", "-1", out=tmp_path)
