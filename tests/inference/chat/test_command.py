"""What chat.py says of a model before the first prompt."""

from pathlib import Path

import pytest

from inference.chat.command import taught_embedded_task


@pytest.mark.parametrize(
    ("place", "settings", "taught"),
    [
        ("step1_sft", "data: {path: [embedded]}", True),
        ("step3_ppo/actor", "data: {path: [embedded]}", True),
        ("step3_ppo/actor", "data: {path: [rows.jsonl]}", False),
        ("step3_ppo/actor", "data: [", False),
        ("step3_ppo/actor", "- 1", False),
        ("elsewhere", "data: {path: [embedded]}", False),
    ],
)
def test_the_settings_beside_a_model_tell_whether_it_was_taught_the_embedded_task(
    tmp_path: Path, place: str, settings: str, taught: bool
) -> None:
    model = tmp_path / place
    model.mkdir(parents=True)
    step = tmp_path / "elsewhere/other" if place == "elsewhere" else tmp_path / Path(place).parts[0]
    step.mkdir(parents=True, exist_ok=True)
    (step / "config.yaml").write_text(settings)

    assert taught_embedded_task(str(model)) is taught
