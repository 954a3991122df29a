from pathlib import Path

import pytest

from pipeline.plan.request import Request, parse_request
from pipeline.system.errors import ConfigError
from train import STAGES


def request(*argv: str) -> Request:
    return parse_request(argv, STAGES).request


def test_documented_options_are_parsed() -> None:
    parsed = request(
        *("--step", "1", "2", "--actor-model", "facebook/opt-1.3b"),
        *("--reward-model", "facebook/opt-350m", "--actor-zero-stage", "0"),
        *("--output-dir", "out", "--deployment-type", "single_node", "--num-processes", "2"),
        *("--data-path", "a.jsonl:2", "b/c", "--data-split", "2,4,4", "--fields", "prompt=q"),
        *("--format", "chatml", "--max-length", "64", "--seed", "7", "--dry-run", "--resume"),
    )

    assert parsed == Request(
        step=(1, 2),
        actor_model="facebook/opt-1.3b",
        reward_model="facebook/opt-350m",
        actor_zero_stage=0,
        output_dir=Path("out"),
        deployment_type="single_node",
        num_processes=2,
        data_path=("a.jsonl:2", "b/c"),
        data_split=(2.0, 4.0, 4.0),
        fields={"prompt": "q"},
        format="chatml",
        max_length=64,
        seed=7,
        dry_run=True,
        resume=True,
    )


def test_options_override_settings_files(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("seed: 1\nstep: [2]\nppo: {kl_coef: 0.1}\n")

    parsed = parse_request(["--config", str(tmp_path / "my.yaml"), "--seed", "2"], STAGES)

    assert (parsed.request.seed, parsed.request.step) == (2, (2,))
    assert parsed.files[0].settings["ppo"] == {"kl_coef": 0.1}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--step 4", "--step must be one of 0, 1, 2, 3, got 4"),
        ("--step", "--step takes at least one value, got none"),
        ("--seed x", "--seed must be an integer or null, got x"),
        ("--kl_coef 1", "there is no option --kl-coef; did you mean --ppo.kl_coef?"),
        ("--data-pth a", "there is no option --data-pth; did you mean --data-path?"),
        ("--zzz", "there is no option --zzz; --help lists the options"),
        ("--resume --overwrite", "--resume keeps earlier results and --overwrite replaces"),
        ("--num-processes 2", "--num-processes needs --deployment-type single_node"),
        ("--hostfile hosts", "--hostfile needs --deployment-type multi_node"),
        ("--autotune run --dry-run", "--autotune runs trials on the machines that this command"),
        ("--zero-config", "--zero-config takes one value, got none"),
        ("--data-path a --data-path=", "--data-path is empty; pass a value, or omit the"),
        ("--actor-model=", "--actor-model is empty; pass a value, or omit the option"),
        ("--actor-zero-stage 4", "--actor-zero-stage must be one of 0, 1, 2, 3 or null, got 4"),
    ],
)
def test_invalid_option_raises_with_its_name(argv: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_request(argv.split(), STAGES)

    assert str(error.value).startswith(message)
