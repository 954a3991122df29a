import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.autotune.trial import WARM_UP, Trial, run_trial, trial_settings
from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.guard_settings import GuardConfig


def try_out(directory: Path, program: str, *, seconds: float = 30.0) -> Trial:
    """Run a program that logs steps by `log(n, rate)` as a trial of three steps."""
    head = """
        import json, os, signal, subprocess, sys, time
        file = open("metrics.jsonl", "a", buffering=1)
        def log(step, rate, **more):
            print(json.dumps({"step": step, "tokens_per_second": rate, **more}), file=file)
    """
    source = directory / "program.py"
    source.write_text(textwrap.dedent(head) + textwrap.dedent(program))
    begin = f"import os, runpy; os.chdir({str(directory)!r}); runpy.run_path('program.py')"
    return run_trial(
        [sys.executable, "-c", begin],
        {},
        metrics=directory / "metrics.jsonl",
        log=directory / "logs" / "1.log",
        steps=3,
        timeout_seconds=seconds,
    )


def test_steps_after_the_warm_up_are_measured_and_the_rest_is_not_waited_for(
    tmp_path: Path,
) -> None:
    trial = try_out(
        tmp_path,
        """
        for step in range(100):
            log(step, 10.0 * step, memory_gb=1.0 if step == 3 else 0.5)
        time.sleep(600)
        """,
    )

    assert trial.outcome == "measured"
    assert trial.tokens_per_second == tuple(10.0 * step for step in range(WARM_UP, WARM_UP + 3))
    assert trial.memory_gb == 1.0
    assert trial.seconds < 30


@pytest.mark.parametrize(
    ("ending", "outcome", "said"),
    [
        ("sys.exit('error: no prompt')", "failed", "error: no prompt"),
        ("os._exit(2)", "refused", "loading"),
        ("os._exit(79)", "out of memory", "loading"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "loading"),
        ("os._exit(137)", "killed", "loading"),  # as torchrun reports a process that was killed
        ("os._exit(0)", "failed", "loading"),  # too few steps
        ("os.kill(os.getpid(), signal.SIGSEGV)", "failed", "loading"),
    ],
)
def test_how_a_trial_ended_is_told_from_its_exit_code(
    tmp_path: Path, ending: str, outcome: str, said: str
) -> None:
    trial = try_out(tmp_path, f"log(1, 5.0); print('loading', flush=True); {ending}")

    assert (trial.outcome, trial.message) == (outcome, said)
    assert trial.tokens_per_second == ()


def test_what_was_measured_counts_though_the_end_failed(tmp_path: Path) -> None:
    trial = try_out(tmp_path, "[log(step, 7.0) for step in range(5)]; os._exit(1)")

    assert (trial.outcome, trial.tokens_per_second) == ("measured", (7.0, 7.0, 7.0))


@pytest.mark.jobs
def test_a_trial_that_hangs_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    trial = try_out(
        tmp_path,
        """
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleep, start_new_session=True)
        open("child", "w").write(str(child.pid))
        time.sleep(600)
        """,
        seconds=2.0,
    )

    assert trial.outcome == "too slow"
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


@pytest.mark.jobs
def test_processes_are_ended_that_outlive_a_launcher_that_was_killed(tmp_path: Path) -> None:
    trial = try_out(
        tmp_path,
        """
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleep, start_new_session=True)
        open("child", "w").write(str(child.pid))
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )

    assert trial.outcome == "killed"
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_a_trial_has_the_steps_of_the_run_and_little_else() -> None:
    out = Path("out")
    sft = SFTConfig(max_steps=500, eval_every=10, patience=3, save_every=5, resume=True)
    reward = RewardConfig()
    ends = GuardConfig(signal="kl", limit=9.0, action="stop")
    ppo = PPOConfig(
        base=FrozenModelConfig(path=EMBEDDED),
        critic_warmup_steps=50,
        save_every=5,
        guards=(ends,),
    )

    tried = trial_settings(sft, out, steps=4, world=2)

    assert tried == replace(
        SFTConfig(output_dir=out, max_steps=6, save_every=None, eval_every=0, keep_best=False),
        data=DataConfig(max_eval_rows=2),
    )
    assert trial_settings(reward, out, steps=4, world=1) == replace(
        reward,
        output_dir=out,
        max_steps=6,
        save_every=None,
        eval_every=0,
        keep_best=False,
        normalization_prompts=2,
        data=DataConfig(max_eval_rows=1),
    )
    tried = trial_settings(ppo, out, steps=1, world=1)
    assert isinstance(tried, PPOConfig)
    assert (tried.max_steps, tried.base.path) == (3, None)
    assert tried.critic_warmup_steps == 0  # else the actor would not learn in any of them
    assert (tried.rollout_size, tried.batch_size) == (ppo.rollout_size, ppo.batch_size)
    assert tried.samples_every > 3
    assert not tried.acting_guards  # which need checkpoints
