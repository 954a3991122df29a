from pathlib import Path

import pytest

from pipeline.plan.inputs import check_inputs
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.plan.stage import split_methods
from pipeline.system.errors import UserError
from tests.pipeline.stages import THREE_STEPS


def check(*argv: str) -> None:
    parsed = parse_request(argv, THREE_STEPS)
    stages = split_methods(THREE_STEPS, parsed.request.method)
    check_inputs(parsed.request, stages, step_configs(parsed, stages))


def get_error(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        check(*argv)
    return str(error.value)


def write_model(directory: Path, *files: str) -> str:
    directory.mkdir(parents=True)
    for file in ("config.json", *files):
        (directory / file).write_text("{}")
    return str(directory)


def test_missing_input_error_has_the_directory_and_the_command(tmp_path: Path) -> None:
    out = str(tmp_path / "out")

    assert get_error("--step", "2", "--output-dir", out) == (
        f"step 2 needs the model of step 1, and there is none in {out}/step1_sft;"
        f" create it with `python train.py --step 1 --output-dir {out}`"
    )
    assert "`python train.py --step 1 --actor-model a/b --data-path c/d --output-dir" in get_error(
        *("--step", "3", "--output-dir", out, "--actor-model", "a/b", "--data-path", "c/d")
    )


def test_data_path_may_have_a_split_a_weight_or_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "rows:2").mkdir()
    paths = (f"{tmp_path}/rows:2", f"{tmp_path}@test:.5", "owner/name/configuration")

    check("--step", "1", "--data-path", *paths)


@pytest.mark.parametrize(
    ("step", "setting", "subdirectory"),
    [
        ("1", "--actor-model", "step1_sft"),
        ("3", "--ppo.actor.path", "step3_ppo/actor"),
        ("3", "--ppo.reference.path", "step3_ppo/../step3_ppo/ema"),
    ],
)
def test_step_that_starts_from_its_output_directory_raises(
    tmp_path: Path, step: str, setting: str, subdirectory: str
) -> None:
    for name in ("step1_sft", "step2_reward", "step3_ppo/actor", "step3_ppo/ema"):
        write_model(tmp_path / name, "config.yaml", "result.json")
    model = str(tmp_path / subdirectory)

    for option in ("--overwrite", "--resume"):
        message = get_error("--step", step, "--output-dir", str(tmp_path), setting, model, option)

        assert f"{model} is in {tmp_path}/step{step}" in message
        assert f", which step {step} may clear before it reads the model" in message
