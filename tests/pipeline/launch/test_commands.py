"""Every command line that is built, word for word."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from pipeline.launch.commands import (
    given_options,
    host_command,
    launch_command,
    node_command,
    step_command,
    step_environment,
)
from pipeline.launch.deployment import Deployment
from pipeline.launch.layout import Layout, layout

STEP = ["-m", "step1_sft.train", "--config", "out/config.yaml"]
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_GPUS_ON_NODE": "8",
}


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


def deployed(**options: object) -> tuple[Layout, Deployment]:
    deployment = Deployment(**options)  # type: ignore[arg-type]
    return layout(deployment, {}), deployment


def line(**options: object) -> str:
    return shlex.join(launch_command(STEP, *deployed(**options)))


def on_nodes(**options: object) -> list[str]:
    where, deployment = deployed(deployment_type="multi_node", **options)
    ranks = range(len(where.hosts))
    return [shlex.join(node_command(STEP, where, rank, deployment)) for rank in ranks]


def test_one_machine_runs_torchrun() -> None:
    assert line(deployment_type="single_node", num_processes=2) == (
        "/env/bin/python -m pipeline.launch.torchrun --standalone --nproc-per-node 2"
        " -m step1_sft.train --config out/config.yaml"
    )


def test_cores_and_logs_are_options_of_torchruns_processes() -> None:
    assert line(
        deployment_type="single_node", num_processes=2, bind_cores=True, log_dir=Path("logs")
    ) == (
        "/env/bin/python -m pipeline.launch.torchrun --standalone --nproc-per-node 2"
        " --log-dir logs/localhost --tee 3"
        " -m pipeline.launch.torchrun --bind step1_sft.train --config out/config.yaml"
    )


def test_several_machines_run_the_launcher_with_the_options_given(hosts: str) -> None:
    said = {"hostfile": Path(hosts), "include": "worker-1:0,2", "bind_cores": True}

    assert line(deployment_type="multi_node", **said) == (
        "/env/bin/python -m pipeline.launch.cluster --hostfile hosts --include worker-1:0,2"
        " --bind-cores --no-check -m step1_sft.train --config out/config.yaml"
    )


def test_each_machine_runs_torchrun_with_its_number(hosts: str) -> None:
    assert on_nodes(hostfile=Path(hosts)) == [
        f"/env/bin/python -m pipeline.launch.torchrun --nnodes 2 --node-rank {rank}"
        " --master-addr worker-0 --master-port 29500 --nproc-per-node 4"
        " -m step1_sft.train --config out/config.yaml"
        for rank in (0, 1)
    ]


def test_where_machines_may_go_and_come_torchrun_has_the_range(hosts: str) -> None:
    assert on_nodes(hostfile=Path(hosts), min_nodes=1, master_port=4000) == [
        "/env/bin/python -m pipeline.launch.torchrun --nnodes 1:2 --max-restarts 100"
        " --rdzv-backend c10d --rdzv-id rlhf --rdzv-endpoint worker-0:4000"
        f" --rdzv-conf is_host={first} --nproc-per-node 4"
        " -m step1_sft.train --config out/config.yaml"
        for first in (1, 0)
    ]


def test_a_step_that_is_started_again_goes_on() -> None:
    elastic = deployed(
        deployment_type="multi_node",
        node_rank=0,
        num_nodes=2,
        min_nodes=1,
        master_addr="a",
        num_gpus=1,
    )

    command = step_command("step1_sft.train", Path("out/config.yaml"), *elastic)

    assert command[-5:] == [*STEP, "--resume"]


def test_ssh_gets_one_line_for_the_hosts_shell(hosts: str, tmp_path: Path) -> None:
    where, deployment = deployed(
        deployment_type="multi_node", hostfile=Path(hosts), ssh_command="ssh -p 2222"
    )

    command = host_command(["/env/bin/python", "-m", "x"], where.hosts[1], where, deployment)

    assert command[:-1] == ["ssh", "-p", "2222", "worker-1"]
    root = Path(__file__).parents[3]
    assert command[-1] == (
        f"cd {tmp_path} || exit 120; test -x /env/bin/python || exit 121;"
        f" exec env PYTHONPATH={root} /env/bin/python -m x"
    )


def test_one_machine_of_an_allocation_is_reached_by_srun() -> None:
    deployment = Deployment(deployment_type="multi_node")
    where = layout(deployment, SLURM)

    command = host_command(["/env/bin/python", "-m", "x"], where.hosts[1], where, deployment)

    assert shlex.join(command[:-1]) == (
        "srun --nodes 1 --ntasks 1 --nodelist gpu08 --overlap --cpu-bind none sh -c"
    )


def test_by_hand_the_command_is_that_of_the_machine() -> None:
    assert line(
        deployment_type="multi_node", node_rank=1, num_nodes=2, num_gpus=8, master_addr="10.0.0.1"
    ) == (
        "/env/bin/python -m pipeline.launch.torchrun --nnodes 2 --node-rank 1"
        " --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 8"
        " -m step1_sft.train --config out/config.yaml"
    )


def test_slurm_starts_torchrun_once_on_each_machine() -> None:
    deployment = Deployment(deployment_type="multi_node")
    where = layout(deployment, SLURM)

    command = launch_command(STEP, where, deployment)

    assert shlex.join(command[:-1]) == (
        "srun --nodes 2 --ntasks-per-node 1 --label --kill-on-bad-exit=1 --quit-on-interrupt"
        " --cpu-bind none bash -c"
    )
    assert command[-1] == (
        "exec /env/bin/python -m pipeline.launch.torchrun --nnodes 2 --node-rank $SLURM_NODEID"
        " --master-addr gpu07 --master-port 30211 --nproc-per-node 8"
        " -m step1_sft.train --config out/config.yaml"
    )


def test_the_options_said_are_those_that_differ() -> None:
    deployment = Deployment(
        deployment_type="multi_node", hostfile=Path("h"), master_port=5, bind_cores=True
    )

    assert given_options(deployment) == ["--hostfile", "h", "--master-port", "5", "--bind-cores"]


def test_one_process_has_all_cores_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = str(len(os.sched_getaffinity(0)))
    assert step_environment(Layout("process"), Deployment())["OMP_NUM_THREADS"] == cores

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert step_environment(Layout("process"), Deployment())["OMP_NUM_THREADS"] == "7"


def test_the_gpus_of_this_machine_that_are_asked_for_are_shown() -> None:
    where, deployment = deployed(deployment_type="single_node", include="localhost:1")

    assert step_environment(where, deployment)["CUDA_VISIBLE_DEVICES"] == "1"


def test_variables_of_a_file_reach_the_step(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("NCCL_DEBUG=INFO\n")

    seen = step_environment(Layout("process"), Deployment(env_file=tmp_path / "env"))

    assert seen["NCCL_DEBUG"] == "INFO"
