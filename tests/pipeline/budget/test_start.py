"""Memory check of a step that is started directly."""

import pytest

from pipeline.budget.fit import check_memory
from pipeline.config import TrainedModelConfig
from pipeline.launch.local import PLANNED
from pipeline.models.hf.known import KNOWN_CONFIGS
from pipeline.system.errors import ConfigError
from step1_sft.config import SFTConfig
from tests.families import HUGE


@pytest.fixture(autouse=True)
def _unset_process_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", PLANNED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.jobs
def test_step_that_exceeds_machine_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_CONFIGS, "huge", HUGE)
    model = TrainedModelConfig(path="huge", precision="fp32", gradient_checkpointing=True)

    with pytest.raises(ConfigError, match=r"^this step needs \d+\.\d GiB on each machine to"):
        check_memory(SFTConfig(model=model, micro_batch_size=1))
