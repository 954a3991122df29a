"""Methods as rows of settings: what they stand for, what wins over them, what is refused."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from pipeline.cli.options import parse_step
from pipeline.plan.request import Request
from pipeline.settings.fields import list_settings, plain
from pipeline.system.errors import ConfigError
from step3_ppo.advantages import ESTIMATORS
from step3_ppo.config import PPOConfig
from step3_ppo.losses import LOSSES
from step3_ppo.methods import ESTIMATOR_NEEDS, METHODS
from step3_preference.config import METHODS as PREFERENCE_METHODS
from step3_preference.config import PreferenceConfig
from tests.step3_ppo.toy import toy_config


@pytest.mark.parametrize("method", METHODS)
def test_a_row_is_what_its_name_stands_for_and_gives_way_to_what_is_said(method: str) -> None:
    row = METHODS[method]

    config = parse_step(PPOConfig, ["--method", method])
    moved = parse_step(PPOConfig, ["--clip_high", "0.5", "--method", method])

    assert {name: getattr(config, name) for name in row} == dict(row)
    assert plain(config) == {**plain(PPOConfig()), **row, "method": method}
    assert moved.clip_high == 0.5
    assert config.method_name == method


def test_every_name_is_a_choice_of_its_setting() -> None:
    choices = {name: get_args(kind) for name, kind in get_type_hints(PPOConfig).items()}
    assert set(choices["method"]) == set(METHODS)
    assert set(choices["advantage"]) == set(ESTIMATORS) == set(ESTIMATOR_NEEDS)
    assert set(choices["loss"]) == set(LOSSES)
    assert set(get_args(get_type_hints(PreferenceConfig)["method"])) == set(PREFERENCE_METHODS)
    (described,) = [each.description for each in list_settings(Request) if each.name == "method"]
    assert not {*METHODS, *PREFERENCE_METHODS} - set(re.findall(r"\w+", described))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kl_in": "loss", "kl_estimator": "k1"}, "k1 in the loss has an expected gradient of 0"),
        ({"kl_in": "reward", "kl_estimator": "k3"}, "ppo.kl_estimator k3 belongs in the loss"),
        ({"kl_in": "none", "kl_target": 6.0}, "ppo.kl_target steers a KL penalty"),
        ({"overlong": "mask", "missing_eos_score": -1.0}, "ppo.overlong mask decides"),
        ({"overlong_buffer": 4.0, "missing_eos_score": -1.0}, "ppo.overlong_buffer 4 decides"),
        ({"overlong_buffer": 4.0, "overlong": "mask"}, "ppo.overlong mask leaves responses"),
        ({"overlong_buffer": 9.0}, "ppo.overlong_buffer must lie between 0 and"),
        ({"correction_cap": 0.5}, "ppo.correction_cap must be at least 1"),
        ({"advantage": "dr_grpo", "group_size": 1}, "set ppo.group_size to 2 or more"),
        ({"baseline": "group"}, "ppo.baseline group belongs to ppo.advantage reinforce_pp"),
        (
            {"advantage": "reinforce_pp", "baseline": "group", "group_size": 1},
            "ppo.baseline group is the mean",
        ),
        ({"dynamic_sampling": 2, "advantage": "gae", "group_size": 1}, "ppo.dynamic_sampling"),
        ({"loss": "cispo", "dual_clip": 3.0}, "ppo.dual_clip bounds a clipped loss"),
    ],
)
def test_contradictions_are_refused_in_a_sentence(
    toy: Path, changes: dict[str, object], named: str
) -> None:
    group: dict[str, Any] = {"advantage": "rloo", "group_size": 4, "kl_in": "none"}
    with pytest.raises(ConfigError, match=named):
        toy_config(toy, **{"missing_eos_score": None, **group, **changes})
