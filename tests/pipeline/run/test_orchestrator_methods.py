"""Runs of several methods: their directories, skipped methods, and failures."""

import json
from pathlib import Path

import pytest

from pipeline.run.orchestrator import main
from tests.pipeline.stages import TOY_STAGES

MODELS = [
    word for role in ("actor", "critic", "reward") for word in (f"--ppo.{role}.path", "some/model")
]


def run(out: Path, *argv: str) -> None:
    argv = ["--output-dir", str(out), "--plan", "off", "--step", "3", *MODELS, *argv]
    main(argv, TOY_STAGES)


def get_result_time(out: Path, method: str) -> int:
    return (out / f"step3_{method}" / "result.json").stat().st_mtime_ns


@pytest.mark.jobs
def test_added_method_runs_alone_in_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--method", "ppo", "grpo", "--methods.grpo.kl_coef", "0.3")
    first = capsys.readouterr().out
    times = [get_result_time(tmp_path, method) for method in ("ppo", "grpo")]

    run(
        tmp_path, "--method", "reinforce_pp", "grpo", "ppo", "--methods.grpo.kl_coef", "0.3",
        "--resume",
    )  # fmt: skip

    summary = json.loads((tmp_path / "summary.json").read_text())
    added = capsys.readouterr().out
    assert "step 3: step3_ppo\nstep 3: step3_grpo\n" in first
    assert "kl_coef: 0.3" in (tmp_path / "step3_grpo" / "config.yaml").read_text()
    assert [get_result_time(tmp_path, method) for method in ("ppo", "grpo")] == times
    assert "(grpo): already finished\nskipping step 3 (ppo): already finished\n" in added
    assert list(summary["steps"]) == ["step3_grpo", "step3_ppo", "step3_reinforce_pp"]
    # The table has room for the longest name, and the report shows a title.
    assert "\nstep3_reinforce_pp          2       2          30   perplexity" in added
    assert "REINFORCE++" in (tmp_path / "report.html").read_text()


@pytest.mark.jobs
def test_diverged_method_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY", "diverged")
    monkeypatch.setenv("TOY_STEP", "step3_ppo")

    with pytest.raises(SystemExit) as exit_info:
        run(tmp_path, "--method", "ppo", "rloo")

    printed = capfd.readouterr()
    assert exit_info.value.code == 80
    assert printed.err.splitlines() == [
        "error: the loss is not finite",
        "step 3 (ppo) diverged, and the other methods continue; to restart it, run the same command"
        " with --resume and a smaller --methods.ppo.actor.optim.lr",
        "not finished: ppo; retry with the same command and --resume",
    ]
    assert (tmp_path / "step3_rloo" / "result.json").is_file()
    assert "numbers  " in printed.out

    before = get_result_time(tmp_path, "rloo")
    monkeypatch.delenv("TOY")
    run(tmp_path, "--method", "ppo", "rloo", "--resume", "--methods.ppo.actor.optim.lr", "1e-7")
    assert (tmp_path / "step3_ppo" / "result.json").is_file()
    assert get_result_time(tmp_path, "rloo") == before
