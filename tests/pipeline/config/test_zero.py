from pathlib import Path

import pytest

from pipeline.config.model import OffloadConfig, ZeroConfig
from pipeline.system.errors import ConfigError


@pytest.mark.parametrize("place", [{"optimizer": "nvme"}, {"params": "nvme"}])
def test_nvme_needs_a_directory(place: dict[str, str]) -> None:
    name = next(iter(place))

    with pytest.raises(ConfigError, match=rf"^offload\.{name} nvme needs offload\.nvme_path"):
        OffloadConfig(**place)
    OffloadConfig(**place, nvme_path=Path("disk"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"max_skipped_steps": 0}, "zero.max_skipped_steps must be above 0, got 0")],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        ZeroConfig(**wrong)

    assert str(error.value) == sentence
