import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.demo.task import sample_prompts
from pipeline.run.orchestrator import main
from pipeline.system.errors import ConfigError
from pipeline.system.memory import control_groups
from tests.commands import start_command
from tests.pipeline.stages import TOY_STAGES


def run(out: Path, *argv: str) -> None:
    main(["--output-dir", str(out), "--plan", "off", *argv], TOY_STAGES)


def test_steps_run_in_order_and_are_summarized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my out"

    run(out, "--step", "1", "3", "--ppo.critic.path", "a/b", "--ppo.reward.path", "a/b")

    summary = json.loads((out / "summary.json").read_text())
    output = capsys.readouterr().out
    assert list(summary["steps"]) == ["step1_sft", "step3_ppo"]
    assert summary["seconds"] == 3.0
    assert (out / "report.html").is_file()
    assert f"report   {out}/report.html" in output
    assert f"chat     python chat.py --path '{out}/step3_ppo'" in output
    # A run of the embedded task ends with prompts to try, one of each kind.
    assert output.splitlines()[-9:] == [f"try      {prompt}" for prompt in sample_prompts()]


def test_resume_skips_finished_steps_and_runs_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--step", "1")
    before = (tmp_path / "step1_sft" / "result.json").stat().st_mtime_ns
    (tmp_path / "notes.txt").write_text("mine")

    run(tmp_path, "--step", "1", "2", "--resume")

    assert "skipping step 1: already finished" in capsys.readouterr().out
    assert (tmp_path / "step1_sft" / "result.json").stat().st_mtime_ns == before
    assert (tmp_path / "step2_reward" / "result.json").is_file()


def test_resume_without_options_repeats_those_of_the_last_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my out"
    run(out, "--step", "1", "--seed", "7", "--fields", '{"prompt": "a b"}')

    main(["--output-dir", str(out), "--resume"], TOY_STAGES)

    assert (out / "command.txt").read_text() == (
        """python train.py --plan off --step 1 --seed 7 --fields '{"prompt": "a b"}'\n"""
    )
    assert "skipping step 1: already finished" in capsys.readouterr().out
    (out / "command.txt").write_text("python train.py --step 1 --seed 8")
    with pytest.raises(ConfigError, match="use that setting"):
        main(["--output-dir", str(out), "--resume"], TOY_STAGES)
    assert f"run, from {out}/command.txt; their relative paths refer" in capsys.readouterr().err
    # If there is another option, all options must be given.
    with pytest.raises(ConfigError, match=r"with sft\.data\.fields\.prompt a b where this run has"):
        run(out, "--resume", "--step", "1", "--seed", "7")


@pytest.mark.parametrize(
    ("toy", "code", "output"),
    [
        ("wrong input", 2, "error: rows.jsonl line 3 has no prompt\n"),
        ("crash", 1, "step 1 failed (exit code 7): "),
        ("killed", 1, "step 1 was killed by signal 9"),
        ("disk full", 81, "error: the disk is full: [Errno 28] No space left on device: "),
    ],
)
def test_failed_step_ends_the_run_and_removes_its_directory(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    toy: str,
    code: int,
    output: str,
) -> None:
    monkeypatch.setenv("TOY", toy)

    with pytest.raises(SystemExit) as exit_info:
        run(tmp_path / "out")

    assert exit_info.value.code == code
    errors = capfd.readouterr().err
    assert errors.startswith(output)
    assert ("free disk space, then run the same command with --resume" in errors) == (
        toy == "disk full"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.jobs
def test_interrupted_run_keeps_its_files_and_prints_how_to_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "from pipeline.cli.options import run_main; from pipeline.run.orchestrator import main\n"
        "from tests.pipeline.stages import TOY_STAGES\n"
        "run_main(lambda argv: main(argv, TOY_STAGES))\n"
    )
    (tmp_path / "toy.py").write_text(program)
    argv = (str(tmp_path / "toy.py"), "--step", "1", "--output-dir", str(out))
    streams = tmp_path / "streams"
    process = start_command(*argv, streams=streams, env={**os.environ, "TOY": "sleep"})
    while not (out / "step1_sft" / "metrics.jsonl").exists():
        assert process.is_alive()
        time.sleep(0.05)

    assert process.pid
    os.kill(process.pid, signal.SIGINT)
    process.join(timeout=30)

    assert process.exitcode == 130
    assert (streams / "err").read_text().splitlines()[-1] == (
        f"interrupted in step 1; {out} keeps the finished results; run the same command with"
        " --resume to continue"
    )
    run(out, "--step", "1", "--resume")
    assert (out / "step1_sft" / "result.json").is_file()


def test_dry_run_prints_the_plan_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    run(out, "--dry-run", "--deployment-type", "single_node", "--num-processes", "1")

    output = capsys.readouterr().out
    assert not out.exists()
    assert output.startswith(f"The plan: 3 steps, 1 process each, into {out}. Nothing is run.")
    assert f"-m tests.pipeline.toy_step --output_dir {out}/step2_reward" in " ".join(
        output.replace("\\\n", " ").split()
    )
    assert "Memory of each process" in output
    assert "weights                  3.6" in output


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group with 300 MiB of host memory."""
    group = control_groups()[0] / f"limited-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("this user can't create control groups")
    limits = [*group.glob("memory.max"), *group.glob("memory.limit_in_bytes")]
    if limits:
        limits[0].write_text(str(300 * 2**20))
        yield group
    group.rmdir()
    if not limits:
        pytest.skip("control groups can't limit memory here")


@pytest.mark.parametrize("killed", [False, True])
def test_out_of_memory_step_continues_with_half_the_micro_batch(
    killed: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TOY", "too large" if killed else "out of memory")
    monkeypatch.setenv("FITS", "3")
    monkeypatch.setenv("GROUP", str(request.getfixturevalue("limited_group")) if killed else "")

    monkeypatch.setenv("TOY_STEP", "step3_ppo")
    run(tmp_path, "--ppo.micro_batch_size", "8", "--ppo.generation_batch_size", "20")

    directory = tmp_path / "step3_ppo"
    assert (directory / "tried").read_text() == "8 4 2 "
    assert "generation_batch_size: 5\n" in (directory / "config.yaml").read_text()
    assert (directory / "result.json").is_file()
    output = capfd.readouterr().err
    assert ("cannot allocate 7 GiB" in output) == (not killed)
    assert "step 3 continues with --ppo.micro_batch_size 2 --ppo.generation_batch_size 5;" in output
    sizes = r"was planned to use about ([\d.]+) MiB .* largest process used ([\d.]+) ([MG])iB"
    ratios = [
        float(size) * (1024 if unit == "G" else 1)
        for planned, size, unit in re.findall(sizes, output)
        if float(planned) > 0
    ]
    assert len(ratios) == 2
    assert min(ratios) > (300 if killed else 0)
    for name, value in {"TOY": "out of memory", "FITS": "0", "TOY_STEP": "step1_sft"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="79"):
        run(tmp_path / "none", "--step", "1", "--sft.micro_batch_size", "1")
