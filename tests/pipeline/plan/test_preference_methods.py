"""Methods that learn from preferences: the steps they need, their rows, what is refused."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.plan.make import make_plan
from pipeline.plan.plan import Plan
from step3_preference.config import PreferenceConfig
from train import STAGES


def plan(out: Path, *argv: str) -> Plan:
    return make_plan(["--output-dir", str(out), *argv], STAGES)


def preference(made: Plan, name: str) -> PreferenceConfig:
    config = made.configs[name]
    assert isinstance(config, PreferenceConfig)
    return config


def steps(made: Plan) -> list[str]:
    return [stage.name for stage in made.stages]


def test_dpo_needs_step_1_and_reads_the_rows_of_the_step_it_leaves_out(tmp_path: Path) -> None:
    made = plan(tmp_path, "--method", "dpo")

    assert steps(made) == ["step1_sft", "step3_dpo"]
    config = preference(made, "step3_dpo")
    assert config.shares == (2, 3)
    assert config.model.path == str(tmp_path / "step1_sft")
    assert config.used_models().keys() == {"model", "base"}
    assert config.output_dir == tmp_path / "step3_dpo"
    assert (config.nll_coef, config.data.max_length) == (0.2, 80)  # embedded.yaml's


def test_with_step_2_the_shares_stay_apart_and_its_model_judges(tmp_path: Path) -> None:
    made = plan(tmp_path, "--step", "1", "2", "3", "--method", "dpo")

    assert steps(made) == ["step1_sft", "step2_reward", "step3_dpo"]
    config = preference(made, "step3_dpo")
    assert config.shares == (3,)
    assert config.reward.path == str(tmp_path / "step2_reward")


def test_methods_of_both_kinds_run_side_by_side(tmp_path: Path) -> None:
    made = plan(
        *(tmp_path, "--method", "ppo", "dpo", "grpo"),
        *("--preference.beta", "0.2", "--methods.dpo.nll_coef", "0.5", "--ppo.kl_coef", "0.3"),
    )

    assert steps(made) == [
        *("step1_sft", "step2_reward", "step3_ppo", "step3_grpo", "step3_dpo"),
    ]
    config = preference(made, "step3_dpo")
    assert (config.beta, config.nll_coef, config.shares) == (0.2, 0.5, (3,))
    assert config.reward.path == str(tmp_path / "step2_reward")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("--preference.beta", "0.2"), "--preference.beta is a setting of the methods dpo, cdpo,"),
        (("--method", "dpo", "--ppo.kl_coef", "1"), "--ppo.kl_coef is a setting of the methods"),
        (
            ("--method", "dpo", "--reward", "math"),
            "--reward is for methods that learn from rewards",
        ),
        (("--method", "dpx"), "--method dpx: there is no such method; did you mean dpo"),
        (("--method", "dpo", "--preference.betta", "1"), "did you mean .*preference.beta"),
    ],
)
def test_options_that_nothing_would_read_are_refused(
    argv: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(tmp_path, *argv)
