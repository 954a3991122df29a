"""Methods that learn from preferences: the steps they need, their rows, what is refused."""

from pathlib import Path

from pipeline.plan.plan import Plan, make_plan
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


def test_methods_of_both_kinds_run_side_by_side(tmp_path: Path) -> None:
    made = plan(
        *(tmp_path, "--method", "ppo", "dpo", "grpo"),
        *("--preference.beta", "0.2", "--methods.dpo.nll_coef", "0.5", "--ppo.kl_coef", "0.3"),
    )

    assert steps(made) == [*("step1_sft", "step2_reward", "step3_ppo", "step3_grpo", "step3_dpo")]
    config = preference(made, "step3_dpo")
    assert (config.beta, config.nll_coef, config.shares) == (0.2, 0.5, (3,))
    assert config.reward.path == str(tmp_path / "step2_reward")
