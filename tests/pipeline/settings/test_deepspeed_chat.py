"""What DeepSpeed-Chat's options are here: the table, its sentences and its page."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, UserErrors
from pipeline.plan.request import Request, parse_request
from pipeline.settings.build import build_config
from pipeline.settings.deepspeed_chat import COUNTERPARTS
from pipeline.settings.describe import list_settings
from step2_reward.config import RewardConfig
from train import STAGES

DOCS = Path(__file__).parents[3] / "docs" / "deepspeed_chat.md"


def test_the_table_names_only_options_that_exist() -> None:
    own = {each.name for each in fields(Request)}
    known = {f"--{name.replace('_', '-')}" for name in own}
    for stage in STAGES:
        settings = [each.name for each in list_settings(stage.config_class)]
        known |= {f"--{prefix}.{name}" for prefix in (stage.section, "STEP") for name in settings}
        known |= {f"--MODEL.{name.partition('.')[2]}" for name in settings}

    assert not COUNTERPARTS.keys() & own
    for name, text in COUNTERPARTS.items():
        named = set(re.findall(r"--[\w.-]*\w", text))
        assert named <= known, name
        assert named or text.startswith("nothing: "), name


def test_an_option_of_deepspeed_chat_is_refused_with_what_to_pass_instead() -> None:
    hint = "in place of DeepSpeed-Chat's pass --lora or --MODEL.lora.rank"
    with pytest.raises(ConfigError, match=f"^there is no option --lora-dim; {hint}"):
        parse_request(["--lora_dim", "1"], STAGES)
    with pytest.raises(ConfigError, match=f"^there is no setting lora_dim; {hint}"):
        build_config(RewardConfig, [], [("lora_dim", ["1"])])


def test_all_options_that_do_not_exist_are_named_at_once() -> None:
    unknown = ["--deepspeed", "--zzz", "1", "--lora-dim", "8"]
    with pytest.raises(UserErrors) as of_train:
        parse_request(["--step", "1", *unknown], STAGES)

    assert [each.partition(";")[0] for each in of_train.value.sentences] == [
        "there is no option --deepspeed",
        "there is no option --zzz",
        "there is no option --lora-dim",
    ]


def test_the_page_has_the_table() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()

    assert [line for line in lines if line.startswith("| `--")] == [
        f"| `--{name}` | {text} |" for name, text in COUNTERPARTS.items()
    ]
