"""Evaluation tasks during training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.__main__ import main as evaluate
from pipeline.config import ParallelConfig
from pipeline.report.figures import before_after
from pipeline.report.page import write_report
from pipeline.report.results import read_results
from step1_sft.config import SFTConfig
from step1_sft.train import train
from tests.distributed import run_ranks
from tests.staged import train_sharded
from tests.step1_sft.test_train import small_task

CORRECT = "eval_arithmetic_correct"


def make_config(directory: Path) -> SFTConfig:
    """Return settings with demonstrations that always answer 7, which solves half of the task."""
    config = small_task(
        directory,
        output_dir=directory / "step1_sft",
        max_steps=16,
        eval_every=8,
        eval_tasks=("arithmetic",),
        eval_task_data={"arithmetic": str(directory / "sums.jsonl")},
        eval_task_tokens=8,
    )
    rows = [{"prompt": f"Add {n} and 1.", "response": "It is 7."} for n in range(40)]
    sums = [{"prompt": f"Add {n} and 1.", "answer": str(7 + n % 2)} for n in range(6)]
    for name, lines in (("rows", rows), ("sums", sums)):
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (directory / f"{name}.jsonl").write_text(text)
    optim = replace(config.model.optim, lr=0.01)
    return replace(config, model=replace(config.model, optim=optim))


def read_accuracies(out: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[CORRECT]) for line in lines if CORRECT in line]


def test_step_logs_and_reports_task_accuracy_of_the_exported_model(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    train(config)

    accuracies = read_accuracies(config.output_dir)
    assert [step for step, _ in accuracies] == [0, 8, 16]
    assert (accuracies[0][1], accuracies[-1][1]) == (0.0, 0.5)
    assert json.loads((config.output_dir / "result.json").read_text())["eval"]["tasks"] == {
        "arithmetic_correct": {"before": 0.0, "after": 0.5, "questions": 6}
    }
    evaluate(
        ["--path", str(config.output_dir), "--tasks", "arithmetic", "--max-new-tokens", "8",
         "--data", f"arithmetic={tmp_path / 'sums.jsonl'}",
         "--output", str(tmp_path / "evaluation.json")]
    )  # fmt: skip
    document = json.loads((tmp_path / "evaluation.json").read_text())
    assert document["figures"][0]["value"] == 0.5
    # Wilson's interval of 3 of 6, by hand: (.5 + .3201 -+ 1.96 sqrt(.0417 + .0267)) / 1.6402
    rows = before_after(read_results(tmp_path).steps["step1_sft"])
    name, before, after = rows[-1]
    assert (name, before) == ("arithmetic, correct", "0%")
    assert after == "50% (18.8% to 81.2%)"
    page = write_report(tmp_path).read_text()
    assert "Arithmetic correct" in page


@pytest.mark.grid
@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(pp=2)])
def test_sharded_models_have_the_accuracy_of_one_process(
    parallel: ParallelConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    sharded = replace(config, output_dir=tmp_path / "both", parallel=parallel)

    train(config)
    run_ranks(train_sharded, train, sharded)

    assert read_accuracies(sharded.output_dir) == read_accuracies(config.output_dir)
