from pathlib import Path

import pytest

from pipeline.config.model import OffloadConfig, ZeroConfig
from pipeline.system.errors import ConfigError


@pytest.mark.parametrize("offload", [{"optimizer": "nvme"}, {"params": "nvme"}])
def test_nvme_offload_requires_a_path(offload: dict[str, str]) -> None:
    name = next(iter(offload))

    with pytest.raises(ConfigError, match=rf"^offload\.{name} nvme needs offload\.nvme_path"):
        OffloadConfig(**offload)
    OffloadConfig(**offload, nvme_path=Path("disk"))


def test_zero_skipped_steps_raise() -> None:
    with pytest.raises(ConfigError, match=r"^zero\.max_skipped_steps must be positive, got 0$"):
        ZeroConfig(max_skipped_steps=0)
