"""Choice of the model in a run's output directory."""

import json
from pathlib import Path

import pytest

from pipeline.report.results import find_model
from pipeline.system.errors import ModelError


def write_step(out: Path, name: str, *, accuracy: float, method: str | None = None) -> None:
    directory = out / name
    (directory / "actor").mkdir(parents=True)
    (directory / "actor" / "config.json").write_text("{}")
    values = {"exported": {"judge": [accuracy, accuracy]}}
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 9, "eval_by_prompt": values}))
    (directory / "config.yaml").write_text(f"method: {method or 'ppo'}\n")
    (directory / "result.json").write_text('{"eval": {"win_rate": 0.5}}')


def write_step_1(out: Path) -> None:
    (out / "step1_sft").mkdir(parents=True)
    (out / "step1_sft" / "config.json").write_text("{}")
    (out / "step1_sft" / "metrics.jsonl").write_text("")
    (out / "step1_sft" / "result.json").write_text('{"eval": {"perplexity_after": 2.0}}')


def test_model_of_the_last_finished_step_is_selected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step_1(tmp_path)
    assert find_model(str(tmp_path)) == str(tmp_path / "step1_sft")
    write_step(tmp_path, "step3_ppo", accuracy=0.0, method="grpo")
    assert find_model(str(tmp_path)) == str(tmp_path / "step3_ppo" / "actor")
    assert find_model(str(tmp_path), "grpo") == str(tmp_path / "step3_ppo" / "actor")

    assert capsys.readouterr().err.splitlines()[-1] == (f"the model is {tmp_path}/step3_ppo/actor")


def test_best_method_is_selected_unless_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step_1(tmp_path)
    write_step(tmp_path, "step3_grpo", accuracy=1.0, method="grpo")
    write_step(tmp_path, "step3_ppo", accuracy=0.5)
    write_step(tmp_path, "step3_rloo", accuracy=0.0, method="rloo")

    assert find_model(str(tmp_path)) == str(tmp_path / "step3_grpo" / "actor")
    assert capsys.readouterr().err == (
        f"the model is {tmp_path}/step3_grpo/actor; select another with --method: ppo, rloo\n"
    )
    assert find_model(str(tmp_path), "ppo") == str(tmp_path / "step3_ppo" / "actor")
    with pytest.raises(ModelError, match=r"no such finished model; it has grpo, ppo, rloo"):
        find_model(str(tmp_path), "raft")


def test_run_without_a_finished_model_raises(tmp_path: Path) -> None:
    (tmp_path / "step1_sft").mkdir()
    (tmp_path / "step1_sft" / "metrics.jsonl").write_text("")

    with pytest.raises(ModelError, match="has no finished model yet"):
        find_model(str(tmp_path))
