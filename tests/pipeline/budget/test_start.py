"""A step that is started by itself looks at memory too, once."""

import pytest

from pipeline.budget.start import check_memory
from pipeline.config import TrainedModelConfig
from pipeline.errors import ConfigError
from pipeline.launch.local import PASSED_ON, PLANNED
from step1_sft.config import SFTConfig

HUGE = SFTConfig(
    model=TrainedModelConfig(
        path="facebook/opt-66b", precision="fp32", gradient_checkpointing=True
    ),
    micro_batch_size=1,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", PLANNED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_it_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    check_memory(SFTConfig(), section="sft")

    said = capsys.readouterr().out
    assert said.startswith("memory: this machine has ")
    assert "; this step takes about " in said


@pytest.mark.jobs
def test_it_refuses_in_its_own_words() -> None:
    with pytest.raises(ConfigError, match=r"^this step takes \d+\.\d GiB on each machine to"):
        check_memory(HUGE, section="sft")


def test_the_other_processes_leave_it_to_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    check_memory(HUGE, section="sft")

    assert capsys.readouterr().out == ""


def test_what_train_py_has_looked_at_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PLANNED, "1")
    check_memory(HUGE, section="sft")

    assert capsys.readouterr().out == ""
    assert PASSED_ON.fullmatch(PLANNED)  # to other machines as well
