"""The command lines that launch a step."""

import shlex
import sys
from pathlib import Path

import pytest

from pipeline.launch.commands import host_command, launch_command, step_environment
from pipeline.launch.layout import Deployment, Host, Layout, resolve_layout

STEP = ["-m", "step1_sft.train", "--config", "out/config.yaml"]
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_GPUS_ON_NODE": "8"}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "executable", "/env/bin/python")


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A host file in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("worker-0 slots=4\nworker-1 slots=4\n")
    return "hosts"


def resolve(**options: object) -> tuple[Layout, Deployment]:
    deployment = Deployment(**options)  # type: ignore[arg-type]
    return resolve_layout(deployment, {}), deployment


def get_command_line(**options: object) -> str:
    return shlex.join(launch_command(STEP, *resolve(**options)))


def test_single_machine_runs_torchrun() -> None:
    assert get_command_line(deployment_type="single_node", num_processes=2) == (
        "/env/bin/python -m pipeline.launch.torchrun --standalone --nproc-per-node 2"
        " -m step1_sft.train --config out/config.yaml"
    )


def test_several_machines_run_the_launcher_with_the_given_options(hosts: str) -> None:
    given = {"hostfile": Path(hosts), "include": "worker-1:0,2"}

    assert get_command_line(deployment_type="multi_node", **given) == (
        "/env/bin/python -m pipeline.launch.cluster --hostfile hosts --include worker-1:0,2"
        " --no-check -m step1_sft.train --config out/config.yaml"
    )


def test_ray_cluster_gets_the_numbers_of_nodes_and_processes() -> None:
    command = launch_command(STEP, Layout("ray", (Host("node 0", (0, 1)),)), Deployment())

    assert command[3:-4] == ["--deployment-type", "ray", "--num-nodes", "1", "--num-gpus", "2"]


def test_ssh_command_ends_with_one_shell_line(hosts: str, tmp_path: Path) -> None:
    layout, deployment = resolve(
        deployment_type="multi_node", hostfile=Path(hosts), ssh_command="ssh -p 2222"
    )

    command = host_command(["/env/bin/python", "-m", "x"], layout.hosts[1], layout, deployment)

    assert command[:-1] == ["ssh", "-p", "2222", "worker-1"]
    root = Path(__file__).parents[3]
    assert command[-1] == (
        f"cd {tmp_path} || exit 120; test -x /env/bin/python || exit 121;"
        f" exec env PYTHONPATH={root} /env/bin/python -m x"
    )


def test_srun_reaches_one_machine_of_an_allocation() -> None:
    deployment = Deployment(deployment_type="multi_node")
    layout = resolve_layout(deployment, SLURM)

    command = host_command(["/env/bin/python", "-m", "x"], layout.hosts[1], layout, deployment)

    assert shlex.join(command[:-1]) == (
        "srun --nodes 1 --ntasks 1 --nodelist gpu08 --overlap --cpu-bind none sh -c"
    )


def test_srun_starts_torchrun_once_on_each_machine() -> None:
    deployment = Deployment(deployment_type="multi_node")
    layout = resolve_layout(deployment, SLURM)

    command = launch_command(STEP, layout, deployment)

    assert shlex.join(command[:-1]) == (
        "srun --nodes 2 --ntasks-per-node 1 --label --kill-on-bad-exit=1 --quit-on-interrupt"
        " --cpu-bind none bash -c"
    )
    assert " --master-addr gpu07 --master-port 30211 --nproc-per-node 8 -m " in command[-1]


def test_included_gpus_of_this_machine_are_visible() -> None:
    layout, deployment = resolve(deployment_type="single_node", include="localhost:1")

    assert step_environment(layout, deployment)["CUDA_VISIBLE_DEVICES"] == "1"
