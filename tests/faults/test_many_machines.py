"""Training on several machines, which are network namespaces."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import Command
from tests.machines import Machines, are_supported
from tests.test_resume import read_exported

PYTHON = (sys.executable,)

needs_machines = pytest.mark.skipif(
    not are_supported(), reason="needs root on Linux, to make network namespaces"
)

SMALL = """
sft: {max_steps: 4, batch_size: 8, micro_batch_size: 2}
reward: {max_steps: 3, batch_size: 4, micro_batch_size: 2}
ppo:
  {max_steps: 2, batch_size: 8, micro_batch_size: 4, generation_batch_size: 8, max_new_tokens: 4}
"""
SMALL_DATA = "--sft.data.max_eval_rows 8 --reward.data.max_eval_rows 8 --ppo.data.max_eval_rows 8"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(tmp_path) as machines:
        yield machines


def run_train(out: Path, *options: str) -> Command:
    """Start `train.py` on the embedded model and task with few, small steps."""
    settings = out.with_name("small.yaml")
    settings.write_text(SMALL)
    return Command(
        *("train.py", "--config", str(settings), "--output-dir", str(out)),
        *SMALL_DATA.split(),
        *options,
        OMP_NUM_THREADS="1",
    )


def ssh_options(ssh: Path, hostfile: Path) -> list[str]:
    return [
        *("--deployment-type", "multi_node", "--hostfile", str(hostfile)),
        *("--ssh-command", str(ssh)),
    ]


def finish(job: Command, code: int = 0, seconds: float = 240) -> str:
    with job:
        assert job.wait(seconds) == code, job.output()
        return job.output()


def read_weights(out: Path) -> dict[str, bytes]:
    """Return the exported models of all steps."""
    return {
        f"{step.name}/{name}": content
        for step in sorted(out.glob("step*"))
        for name, content in read_exported(step).items()
        if name.endswith(".safetensors")
    }


@needs_machines
@pytest.mark.faults
@pytest.mark.timeout(600)
def test_two_machines_train_the_same_weights_as_one(tmp_path: Path, machines: Machines) -> None:
    finish(run_train(tmp_path / "many", *ssh_options(machines.ssh, machines.hostfile(tmp_path))))
    finish(run_train(tmp_path / "one", "--deployment-type", "single_node", "--num-processes", "2"))

    steps = json.loads((tmp_path / "many" / "summary.json").read_text())["steps"]
    assert list(steps) == ["step1_sft", "step2_reward", "step3_ppo"]
    assert read_weights(tmp_path / "many") == read_weights(tmp_path / "one")
    assert len(read_weights(tmp_path / "one")) >= 4


def wait_for_checkpoint(out: Path, job: Command, step: str = "step1_sft") -> None:
    deadline = time.monotonic() + 300
    while not list((out / step / "checkpoints").glob("step_*/manifest.json")):
        assert time.monotonic() < deadline, job.output()
        assert job.process.poll() is None, job.output()
        time.sleep(0.05)


LONG = ["--step", "1", "--sft.max_steps", "60", "--sft.batch_size", "64", "--save-every", "2"]


@needs_machines
@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["killed", "cut off"])
def test_lost_machine_is_named_and_the_job_resumes(
    fault: str, tmp_path: Path, machines: Machines
) -> None:
    out = tmp_path / "many"
    options = [*ssh_options(machines.ssh, machines.hostfile(tmp_path)), *LONG]
    with run_train(out, *options) as job:
        wait_for_checkpoint(out, job)
        start = time.monotonic()
        machines.kill("worker-1") if fault == "killed" else machines.disconnect()
        code = job.wait(200)
        seconds = time.monotonic() - start
        output = job.output()
    machines.reconnect()

    assert code == 1, output
    assert "worker-1" in output
    assert seconds < (60 if fault == "killed" else 150), output
    finish(run_train(out, *options, "--resume"))
    finish(
        run_train(
            tmp_path / "one", "--deployment-type", "single_node", "--num-processes", "2", *LONG
        )
    )
    assert read_weights(out) == read_weights(tmp_path / "one")
