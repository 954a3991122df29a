from pathlib import Path

import pytest

from pipeline.cli.options import parse_step
from pipeline.system.errors import ConfigError
from step1_sft.config import SFTConfig

MESSAGES = (
    ("a:\n  b: [c, d\ne: 1", "--config {} is not valid YAML at line 3: "),
    ("- 1", "--config {} must be a mapping, `name: value`, got [1]"),
    ("3: 4", "there is no setting 3 in {}"),
    (
        "epochs: 1\nmodel:\n  path: a\n  zero_stage: 1\n  path: b",
        "--config {} has path twice, on lines 3 and 5; keep one of them",
    ),
    ("model.optim.lr: 1", "there is no setting model.optim.lr in {}; nest the sections"),
    ("lr: 1", "there is no setting lr in {}; did you mean model.lora.lr or model.optim.lr?"),
    ("model: {optim: {lr: fast}}", "model.optim.lr in {} must be a number, got fast"),
    ("epochs: .inf", "epochs in {} must be a finite number, got inf"),
    ("model: {optim: {lr: '-Infinity'}}", "model.optim.lr in {} must be a finite number, got -"),
    ("max_steps: on", "max_steps in {} must be a number, got True"),
    ("model: {zero_stage: true}", "model.zero_stage in {} must be a number, got True"),
    ("seed: null", "seed in {} must be an integer, got null"),
    ("a: " + 3000 * "[", "--config {} is nested too deeply"),
)
"""Contents of a settings file and the message about it, with {} for the path."""


@pytest.mark.parametrize(("text", "message"), MESSAGES)
def test_error_names_the_settings_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError) as error:
        parse_step(SFTConfig, ["--config", str(file)])

    assert message.replace("{}", str(file)) in str(error.value)


def test_off_and_numbers_in_quotes_are_values_and_an_empty_mapping_takes_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.yaml").write_text(
        "output_dir: ~/x\nmodel: {kernels: off, zero_stage: '2'}\ndata:\n  fields:\n"
    )

    config = parse_step(SFTConfig, ["--config=~/my.yaml", "--data.fields.prompt", "q"])

    assert (config.model.kernels, config.data.fields) == ("off", {"prompt": "q"})
    assert config.model.zero_stage == 2
    assert config.output_dir == tmp_path / "x"
