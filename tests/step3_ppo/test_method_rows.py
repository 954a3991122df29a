"""Methods as rows of default settings."""

import re
from typing import get_args, get_type_hints

import pytest

from pipeline.cli.options import parse_step
from pipeline.plan.request import Request
from pipeline.settings.fields import list_settings, to_plain
from step3_ppo.advantages import ESTIMATORS
from step3_ppo.config import PPOConfig
from step3_ppo.losses import LOSSES
from step3_ppo.methods import ESTIMATOR_NEEDS, METHODS
from step3_preference.config import METHODS as PREFERENCE_METHODS
from step3_preference.config import PreferenceConfig
from tests.sources import ROOT


@pytest.mark.parametrize("method", METHODS)
def test_method_sets_its_row_and_explicit_options_override_it(method: str) -> None:
    row, teacher = METHODS[method], ["--teacher.path", "it"] * (method in ("distill", "gkd"))

    config = parse_step(PPOConfig, ["--method", method, *teacher])
    overridden = parse_step(PPOConfig, ["--clip_high", "0.5", "--method", method, *teacher])

    assert {name: getattr(config, name) for name in row} == dict(row)
    default = PPOConfig(teacher=config.teacher, output_dir=config.output_dir)
    assert to_plain(config) == {**to_plain(default), **row, "method": method}
    assert overridden.clip_high == 0.5
    assert config.method_name == method


def test_every_method_is_a_documented_choice() -> None:
    choices = {name: get_args(kind) for name, kind in get_type_hints(PPOConfig).items()}
    assert set(choices["method"]) == set(METHODS)
    assert set(choices["advantage"]) == set(ESTIMATORS) == set(ESTIMATOR_NEEDS)
    assert set(choices["loss"]) == set(LOSSES)
    assert set(get_args(get_type_hints(PreferenceConfig)["method"])) == set(PREFERENCE_METHODS)
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("methods.md", "ppo.md")]
    assert not [name for name in METHODS if f"\n## {name}\n" not in pages[0]]
    assert not [name for name in METHODS if f"\n| `{name}` (" not in pages[1]]
    assert not [name for name in (*ESTIMATORS, *LOSSES) if f"\n| `{name}` |" not in pages[1]]
    (described,) = [s.description for s in list_settings(Request) if s.name == "method"]
    assert not {*METHODS, *PREFERENCE_METHODS} - set(re.findall(r"\w+", described))
