"""Several methods in one run: a directory each, what is skipped, and what one failure ends."""

import json
from pathlib import Path

import pytest

from pipeline.run.orchestrator import main
from tests.pipeline.stages import TOY_STAGES

MODELS = [
    word for role in ("actor", "critic", "reward") for word in (f"--ppo.{role}.path", "some/model")
]


def run(out: Path, *argv: str) -> None:
    words = ["--output-dir", str(out), "--plan", "off", "--step", "3", *MODELS, *argv]
    main(words, TOY_STAGES)


def written(out: Path, method: str) -> int:
    return (out / f"step3_{method}" / "result.json").stat().st_mtime_ns


@pytest.mark.jobs
def test_each_method_has_a_directory_and_a_method_that_is_added_runs_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--method", "ppo", "grpo", "--methods.grpo.kl_coef", "0.3")
    first = capsys.readouterr().out
    before = [written(tmp_path, method) for method in ("ppo", "grpo")]

    run(
        tmp_path, "--method", "reinforce_pp", "grpo", "ppo", "--methods.grpo.kl_coef", "0.3",
        "--resume",
    )  # fmt: skip

    summary = json.loads((tmp_path / "summary.json").read_text())
    added = capsys.readouterr().out
    assert "step 3: step3_ppo\nstep 3: step3_grpo\n" in first
    assert "kl_coef: 0.3" in (tmp_path / "step3_grpo" / "config.yaml").read_text()
    assert [written(tmp_path, method) for method in ("ppo", "grpo")] == before
    assert "(grpo): already finished\nskipping step 3 (ppo): already finished\n" in added
    assert list(summary["steps"]) == ["step3_grpo", "step3_ppo", "step3_reinforce_pp"]
    # The longest name leaves room, and one that is read in the report is a step.
    assert "\nstep3_reinforce_pp          2       2          30   perplexity" in added
    assert "REINFORCE++" in (tmp_path / "report.html").read_text()


@pytest.mark.jobs
def test_a_method_that_diverges_is_announced_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY", "diverged")
    monkeypatch.setenv("TOY_STEP", "step3_ppo")

    with pytest.raises(SystemExit) as end:
        run(tmp_path, "--method", "ppo", "rloo")

    failed = capfd.readouterr()
    assert end.value.code == 80
    assert failed.err.splitlines() == [
        "error: the loss is not finite",
        "step 3 (ppo) diverged, and the other methods continue; the same command with --resume and"
        " a smaller --methods.ppo.actor.optim.lr restarts it",
        "not finished: ppo; retry with the same command and --resume",
    ]
    assert (tmp_path / "step3_rloo" / "result.json").is_file()
    assert "numbers  " in failed.out

    before = written(tmp_path, "rloo")
    monkeypatch.delenv("TOY")
    run(tmp_path, "--method", "ppo", "rloo", "--resume", "--methods.ppo.actor.optim.lr", "1e-7")
    assert (tmp_path / "step3_ppo" / "result.json").is_file()
    assert written(tmp_path, "rloo") == before
