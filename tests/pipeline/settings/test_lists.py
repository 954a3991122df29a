"""Settings that are lists of dataclasses: from files, from the command line, and back."""

from pathlib import Path

import pytest

from pipeline.cli.options import parse_step
from pipeline.settings.fields import to_options
from pipeline.system.errors import ConfigError
from step3_ppo.config import PPOConfig


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("math", 'rewards.* must be a list such as .*"name": .*got math'),
        ('[{"kind": "math"}]', "rewards.* lacks its name"),
        ('[{"name": "a"}]', "rewards.* lacks its kind"),
        ('[{"name": "a", "kind": "mth"}]', "rewards.kind.* must be one of .*'math'"),
        ('[{"name": "a", "kind": "math", "wieght": 2}]', "did you mean rewards.weight"),
        ('[{"name": "a", "kind": "math", "weight": "x"}]', "rewards.weight.* must be a number"),
        ('[{"name": "a b", "kind": "math"}]', "letters, digits and _"),
        ('[{"name": "1a", "kind": "math"}]', "begin with a letter and consist of"),
        ('[{"name": "score", "kind": "math"}]', "metric name reward_score is reserved"),
    ],
)
def test_invalid_list_item_raises(value: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(f"rewards: {value}\n")

    for argv in (["--rewards", value], ["--config", str(tmp_path / "wrong.yaml")]):
        with pytest.raises(ConfigError, match=message):
            parse_step(PPOConfig, argv)


def test_guard_preset_works_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "words.yaml").write_text("guards: strict\nsave_every: 5\n")

    config = parse_step(PPOConfig, ["--guards", "strict", "--save_every", "5"])

    assert config == parse_step(PPOConfig, ["--config", str(tmp_path / "words.yaml")])
    actions = {str(guard): guard.action for guard in config.guards}
    assert actions["divergence>2"] == actions["repetition>0.3"] == "rollback"
    assert actions["ratio_max>20"] == "warn"  # concerns a single iteration
    assert all(
        guard.action == "none" for guard in parse_step(PPOConfig, ["--guards", "none"]).guards
    )
    assert parse_step(PPOConfig, ["--guards", "warn"]) == parse_step(PPOConfig, [])
    assert to_options(parse_step(PPOConfig, [])) == []
    options = [word for name, words in to_options(config) for word in (f"--{name}", *words)]
    assert parse_step(PPOConfig, options) == config


def test_text_setting_keeps_braces() -> None:
    assert parse_step(PPOConfig, ["--actor.path", "{a: 1}"]).actor.path == "{a: 1}"
