"""Where processes run: host files, their filters, SLURM's lists, GPUs, and variables."""

import os
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.deployment import Deployment
from pipeline.launch.layout import Host, expand_nodelist, layout, read_hostfile, select_hosts
from pipeline.launch.local import (
    count_gpus,
    count_processes,
    passed_on,
    read_env_file,
    share_of_cores,
)

TWO = [Host(f"worker-{n}", (0, 1, 2, 3), f"hosts:{n + 1}") for n in range(2)]
MANY = "multi_node"
SLURM = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "a[1-3]", "SLURM_GPUS_ON_NODE": "gpu:4"}


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)


def test_a_file_names_hosts_with_slots(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# my cluster\n\nworker-0 slots=2\n  ann@10.0.0.7\tslots=1  # the old one\n")

    assert read_hostfile(file) == [
        Host("worker-0", (0, 1), f"{file}:3"),
        Host("ann@10.0.0.7", (0,), f"{file}:4"),
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a slots=1\nb", ":2: "),
        ("a slots=0", ":1: "),
        ("-oProxyCommand=x slots=1", ":1: "),
        ("a;rm slots=1", ":1: "),
        ("a slots=1\nb slots=2\na slots=3", ":3: a is named twice"),
        ("# nothing\n", " names no host"),
    ],
)
def test_a_mistake_in_a_file_is_named_by_its_line(tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)

    with pytest.raises(ConfigError) as error:
        read_hostfile(file)

    assert f"{file}{place}" in str(error.value)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
        ({"include": "worker-1"}, {"worker-1": (0, 1, 2, 3)}),
        ({"include": "worker-0@worker-1:0,2"}, {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ({"include": "worker-1:2,0@worker-0:1"}, {"worker-0": (1,), "worker-1": (0, 2)}),
        ({"include": "worker-1:1-3"}, {"worker-1": (1, 2, 3)}),
        ({"exclude": "worker-0"}, {"worker-1": (0, 1, 2, 3)}),
        ({"exclude": "worker-1:0"}, {"worker-0": (0, 1, 2, 3), "worker-1": (1, 2, 3)}),
        ({"exclude": "worker-1:0-3"}, {"worker-0": (0, 1, 2, 3)}),
        ({"num_nodes": 1}, {"worker-0": (0, 1, 2, 3)}),
        ({"num_gpus": 2}, {"worker-0": (0, 1), "worker-1": (0, 1)}),
    ],
)
def test_options_select_hosts_and_slots(
    options: dict[str, int | str], left: dict[str, tuple[int, ...]]
) -> None:
    found = select_hosts(TWO, **options)  # type: ignore[arg-type]

    assert {host.name: host.slots for host in found} == left


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"include": "worker-2"}, "did you mean worker-1?"),
        ({"include": "worker-0:4"}, "worker-0 has no slot 4"),
        ({"include": "worker-0:x"}, "write hosts and slots as"),
        ({"include": "worker-0@"}, "write hosts and slots as"),
        ({"exclude": "worker-0:1@worker-0:2"}, "worker-0 is named twice"),
        ({"exclude": "worker-0@worker-1"}, "leaves no host"),
        ({"num_nodes": 3}, "more than the 2 hosts"),
        ({"num_gpus": 5}, "more than the 4 slots of worker-0"),
    ],
)
def test_an_unknown_host_or_slot_is_refused(options: dict[str, int | str], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        select_hosts(TWO, **options)  # type: ignore[arg-type]

    assert named in str(error.value)


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("ann@worker-0 slots=4\nworker-1 slots=2\n")
    return file


def test_one_process_per_gpu_of_one_machine() -> None:
    where = layout(Deployment(deployment_type="single_node"), {})

    assert (where.by, where.processes, str(where)) == ("node", 2, "2 processes each")


def test_machines_of_a_file_meet_at_the_first_one(hostfile: Path) -> None:
    where = layout(Deployment(deployment_type=MANY, hostfile=hostfile), SLURM)

    assert (where.by, where.address, where.port) == ("ssh", "worker-0", 29500)
    assert (where.processes, str(where)) == (6, "6 processes each on 2 machines")
    assert not where.is_elastic


def test_the_fewest_machines_are_those_with_which_a_job_goes_on(hostfile: Path) -> None:
    where = layout(Deployment(deployment_type=MANY, hostfile=hostfile, min_nodes=1), {})

    assert (where.fewest, len(where.hosts), where.is_elastic) == (1, 2, True)


def test_inside_of_an_allocation_its_machines_are_used() -> None:
    where = layout(Deployment(deployment_type=MANY), SLURM)

    assert (where.by, where.address, where.port) == ("slurm", "a1", 29505)
    assert [(host.name, len(host.slots)) for host in where.hosts] == [
        ("a1", 4),
        ("a2", 4),
        ("a3", 4),
    ]


def test_by_hand_each_machine_is_told_its_number() -> None:
    where = layout(
        Deployment(deployment_type=MANY, node_rank=1, num_nodes=2, master_addr="h", master_port=7),
        SLURM,
    )

    assert (where.by, where.address, where.port, where.processes) == ("hand", "h", 7, 4)


def test_by_hand_a_host_file_says_the_rest(hostfile: Path) -> None:
    where = layout(Deployment(deployment_type=MANY, node_rank=1, hostfile=hostfile), {})

    assert (where.by, where.address, where.processes) == ("hand", "worker-0", 6)


@pytest.mark.parametrize(
    ("options", "environment", "missing"),
    [
        ({}, {}, "--hostfile"),
        ({"node_rank": 0}, {}, "--num-nodes"),
        ({"node_rank": 0, "num_nodes": 2}, {}, "--master-addr"),
        ({"node_rank": 2, "num_nodes": 2, "master_addr": "a"}, {}, "--node-rank"),
        ({"include": "a1"}, SLURM, "--hostfile"),
        ({"min_nodes": 4}, SLURM, "--min-nodes 4"),
        ({"num_nodes": 4}, SLURM, "--num-nodes 4"),
    ],
)
def test_a_missing_option_is_named(
    options: dict[str, object], environment: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigError) as error:
        layout(Deployment(deployment_type=MANY, **options), environment)  # type: ignore[arg-type]

    assert missing in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        {"hostfile": Path("h")},
        {"include": "localhost:0"},
        {"deployment_type": MANY, "num_processes": 2},
        {"deployment_type": MANY, "include": "a", "exclude": "b"},
        {"deployment_type": MANY, "include": "a", "num_gpus": 2},
        {"deployment_type": MANY, "exclude": "a", "num_nodes": 2},
        {"deployment_type": MANY, "num_nodes": 0},
        {"deployment_type": MANY, "master_port": 70000},
        {"deployment_type": "single_node", "num_gpus": 1, "num_processes": 1},
    ],
)
def test_contradicting_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Deployment(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b2", ["a", "b2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[1-2]-gpu", ["r1-gpu", "r2-gpu"]),
    ],
)
def test_slurms_lists_of_names_are_written_out(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n]"])
def test_a_list_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no machine; run this inside sbatch or salloc"):
        expand_nodelist(text)


@pytest.mark.parametrize(("visible", "gpus"), [("", 0), ("-1", 0), ("0", 1), ("0,3", 2)])
def test_visible_devices_are_counted(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert count_gpus() == gpus


def test_gpus_are_counted_as_the_driver_lists_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: a)'\necho 'GPU 1: H200 (UUID: b)'\n")
    tool.chmod(0o755)

    assert count_gpus() == 2


def test_a_node_runs_one_process_per_gpu_or_two_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert (count_processes(None), count_processes(2)) == (3, 2)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (count_processes(None), count_processes(4)) == (2, 4)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    with pytest.raises(ConfigError, match="--num-processes 3 is more than the 2 GPUs"):
        count_processes(3)


def test_processes_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))

    assert [share_of_cores(n) for n in (1, cores, 10 * cores)] == [cores, 1, 1]


def test_variables_of_libraries_are_passed_on_and_nothing_else() -> None:
    listed = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "ib0",
        "OMP_NUM_THREADS": "4",
        "HF_TOKEN": "secret",
        "WANDB_API_KEY": "secret",
        "PYTORCH_ALLOC_CONF": "x",
        "PYTHONUNBUFFERED": "1",
        "CUDA_LAUNCH_BLOCKING": "1",
        "https_proxy": "p",
    }
    own = {
        "PATH": "/bin",
        "HOME": "/root",
        "PYTHONPATH": "/here",
        "LD_LIBRARY_PATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "3",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "RANK": "0",
        "MASTER_ADDR": "a",
        "MY_NCCL_DEBUG": "x",
        "SSH_AUTH_SOCK": "s",
    }

    assert passed_on({**listed, **own}, None) == listed


def test_a_file_adds_variables_of_any_name(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("# mine\n\nMY_SWITCH=on\nexport NCCL_DEBUG='WARN'\nEMPTY=\nURL=http://a/?b=c\n")

    assert passed_on({"NCCL_DEBUG": "INFO"}, file) == {
        "NCCL_DEBUG": "WARN",
        "MY_SWITCH": "on",
        "EMPTY": "",
        "URL": "http://a/?b=c",
    }


@pytest.mark.parametrize("line", ["hf_abcdef", "MY KEY=hf_abcdef", "=hf_abcdef"])
def test_a_wrong_line_is_named_by_its_place_and_not_shown(tmp_path: Path, line: str) -> None:
    file = tmp_path / "env"
    file.write_text(f"A=1\n{line}\n")

    with pytest.raises(ConfigError) as error:
        read_env_file(file)

    assert str(error.value) == f"{file}:2: a line is NAME=VALUE, without blanks around ="
