"""Several methods side by side: their settings, what is refused, what a dry run says."""

from pathlib import Path

import pytest
import yaml

from pipeline.plan.plan import Plan, make_plan
from pipeline.settings.fields import flatten, to_plain
from pipeline.system.errors import UserError
from train import STAGES


def plan(out: Path, *argv: str) -> Plan:
    return make_plan(["--output-dir", str(out / "out"), *argv], STAGES)


def step3(made: Plan) -> dict[str, dict[str, object]]:
    """Settings of each step 3, by its name."""
    return {
        stage.name: flatten(to_plain(made.configs[stage.name]))
        for stage in made.stages
        if stage.number == 3
    }


def test_each_method_has_its_row_and_what_all_were_given(tmp_path: Path) -> None:
    made = plan(tmp_path, "--method", "ppo", "rloo", "dr_grpo", "--ppo.max_steps", "9")

    steps = step3(made)
    assert [stage.name for stage in made.stages] == [
        *("step1_sft", "step2_reward"),
        *("step3_ppo", "step3_rloo", "step3_dr_grpo"),
    ]
    assert [step["method"] for step in steps.values()] == ["ppo", "rloo", "dr_grpo"]
    assert [step["kl_coef"] for step in steps.values()] == [0.2, 0.05, 0.2]  # embedded.yaml's
    for name, step in steps.items():
        assert step["max_steps"] == 9
        assert step["output_dir"] == str(tmp_path / "out" / name)
        assert step["actor.path"] == str(tmp_path / "out" / "step1_sft")
        assert step["reward.path"] == str(tmp_path / "out" / "step2_reward")


def test_settings_of_one_method_win_over_those_of_all_in_the_same_place(tmp_path: Path) -> None:
    low, high = tmp_path / "low.yaml", tmp_path / "high.yaml"
    low.write_text(
        "method: [grpo, rloo]\nppo: {batch_size: 8}\n"
        "methods:\n  grpo: {batch_size: 16, kl_coef: 0.5, seed: 3}\n  raft: {kl_coef: 9.0}\n"
    )
    high.write_text("ppo: {kl_coef: 0.6}\n")
    files = ("--config", str(low), str(high))

    by_files = step3(plan(tmp_path, *files))
    by_options = step3(plan(tmp_path, *files, "--methods.grpo.kl_coef", "1", "--ppo.kl_coef", "2"))

    assert [step["batch_size"] for step in by_files.values()] == [16, 8]
    assert [step["kl_coef"] for step in by_files.values()] == [0.6, 0.6]  # the later file
    assert [step["kl_coef"] for step in by_options.values()] == [1.0, 2.0]
    assert [step["seed"] for step in by_options.values()] == [3, 1234]


REFUSED = {
    "--method ppo gpro": "--method gpro: no such method; did you mean gspo?",
    "--method ppo ppo": "--method lists ppo twice",
    "--method ppo grpo --methods.rloo.clip 0.1": (
        "--methods.rloo.clip is for a method that does not run; add rloo to --method"
    ),
    "--method ppo grpo --ppo.method rloo": (
        "method ppo: ppo.method can't be set when --method names several methods; omit it"
    ),
    "--method ppo grpo dapo --methods.grpo.foo 1": (
        "method grpo: there is no setting ppo.foo; --help lists the settings"
    ),
    "--method ppo grpo rloo --ppo.gamma 0.9": (
        "method grpo: ppo.gamma 0.9 discounts the returns of a critic, but ppo.advantage dr_grpo"
        " sums a response's rewards undiscounted; leave it at 1"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_contradicts_is_refused_with_the_method(words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        plan(tmp_path, *words.split())

    assert str(error.value) == REFUSED[words]


def test_finished_methods_are_skipped_and_another_runs(tmp_path: Path) -> None:
    first = plan(tmp_path, "--method", "ppo", "grpo", "--step", "3", *_MODELS)
    for stage in first.stages:
        directory = tmp_path / "out" / stage.name
        directory.mkdir(parents=True)
        settings = to_plain(first.configs[stage.name])
        (directory / "config.yaml").write_text(yaml.safe_dump(settings))
        (directory / "result.json").write_text("{}")
    (tmp_path / "out" / "step3_ppo" / "result.json").unlink()

    words = ("--step", "3", *_MODELS, "--resume")
    again = plan(tmp_path, "--method", "rloo", "ppo", "grpo", *words)
    alone = plan(tmp_path, "--method", "dapo", "rloo", "--step", "3", *_MODELS)

    assert again.finished == {"step3_grpo"}
    assert alone.finished == set()  # the other methods of the run are no conflict
    with pytest.raises(UserError, match=r"step 3 in \S+/step3_grpo was finished with ppo.clip 0.2"):
        plan(tmp_path, "--method", "ppo", "grpo", *words, "--methods.grpo.clip", "0.1")


_MODELS = [word for role in ("actor", "critic", "reward") for word in (f"--ppo.{role}.path", "a/b")]
