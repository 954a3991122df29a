import pytest

from pipeline.config import OptimConfig
from pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("schedule", "settings", "sentence"),
    [
        ("linear", {"power": 2}, "power is not a parameter of the schedule linear; it takes none"),
        ("warmup", {"warmup_type": "cubic"}, "warmup_type must be 'log' or 'linear', got cubic"),
        ("polynomial", {"power": 0}, "power must be greater than 0, got 0"),
        ("polynomial", {"power": True}, "power must be a valid number, got True"),
    ],
)
def test_parameters_of_schedules_are_checked(
    schedule: str, settings: dict[str, bool | int | float | str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        OptimConfig(schedule=schedule, schedule_params=settings)

    assert str(error.value) == f"optim.schedule_params.{sentence}"
