"""Plans of preference methods: the steps they need and their rows."""

from pathlib import Path
from typing import Any

from pipeline.plan.plan import Plan
from tests.pipeline.plan.test_checks import plan as make


def steps(plan: Plan) -> list[str]:
    return [stage.name for stage in plan.stages]


def test_dpo_needs_only_step_1_and_uses_the_rows_of_step_2(tmp_path: Path) -> None:
    plan = make(tmp_path, "--method", "dpo")

    assert steps(plan) == ["step1_sft", "step3_dpo"]
    config: Any = plan.configs["step3_dpo"]
    assert config.shares == (2, 3)
    assert config.model.path == str(tmp_path / "step1_sft")
    assert config.used_models().keys() == {"model", "base"}
    assert config.output_dir == tmp_path / "step3_dpo"
    assert (config.nll_coef, config.data.max_length) == (0.2, 80)  # embedded.yaml's


def test_rl_and_preference_methods_run_together(tmp_path: Path) -> None:
    plan = make(
        *(tmp_path, "--method", "ppo", "dpo", "grpo"),
        *("--preference.beta", "0.2", "--methods.dpo.nll_coef", "0.5", "--ppo.kl_coef", "0.3"),
    )

    assert steps(plan) == [*("step1_sft", "step2_reward", "step3_ppo", "step3_grpo", "step3_dpo")]
    config: Any = plan.configs["step3_dpo"]
    assert (config.beta, config.nll_coef, config.shares) == (0.2, 0.5, (3,))
    assert config.reward.path == str(tmp_path / "step2_reward")
