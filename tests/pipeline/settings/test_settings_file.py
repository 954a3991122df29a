from pathlib import Path

import pytest

from pipeline.cli import parse_step
from pipeline.errors import ConfigError
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.settings.file import read_settings
from step1_sft.config import SFTConfig
from tests.pipeline.stages import THREE_STEPS

SENTENCES = (
    ("a:\n  b: [c, d\ne: 1", "--config {} is not valid YAML in line 3: "),
    ("- 1", "--config {} must hold settings, `name: value`; it holds [1]"),
    ("3: 4", "3 in --config {} is not text"),
    (
        "epochs: 1\nmodel:\n  path: a\n  zero_stage: 1\n  path: b",
        "--config {} has path twice, in lines 3 and 5; keep one of them",
    ),
    ("lr: 1", "there is no setting lr in {}; did you mean model.lora.lr or model.optim.lr?"),
    ("model: {optim: {lr: fast}}", "model.optim.lr in {} must be a number, got fast"),
    ("epochs: -1", "epochs in {} must be above 0, got -1.0"),
    ("seed: null", "seed in {} must be a whole number, got null"),
    ("a: " + 3000 * "[", "--config {} is nested too deeply to be settings"),
)
"""Contents of a file, and the sentence about it, with the file in place of {}."""


@pytest.mark.parametrize(("text", "sentence"), SENTENCES)
def test_a_file_that_cant_be_used_is_named_with_the_line(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError) as error:
        parse_step(SFTConfig, ["--config", str(file)])

    assert sentence.replace("{}", str(file)) in str(error.value)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "windows.yaml"
    file.write_bytes(b"\xef\xbb\xbfseed: 1\r\nsft:\r\n  epochs: 2\r\n")

    assert read_settings(file).settings == {"seed": 1, "sft": {"epochs": 2}}


def test_an_anchor_may_be_used_twice(tmp_path: Path) -> None:
    file = tmp_path / "anchor.yaml"
    file.write_text("sft: &one {epochs: 2}\nreward: *one\nppo: {<<: *one, epochs: 3}\n")

    assert read_settings(file).settings == {
        "sft": {"epochs": 2},
        "reward": {"epochs": 2},
        "ppo": {"epochs": 3},
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("step: 4", "step in {} must be one of 0, 1, 2, 3, got 4"),
        ("sft: {epochs: -1}", "sft.epochs in {} must be above 0, got -1.0"),
    ],
)
def test_train_names_the_file_of_a_wrong_value(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError) as error:
        step_configs(parse_request(["--config", str(file)], THREE_STEPS), THREE_STEPS)

    assert str(error.value) == sentence.format(file)
