"""Placement of processes: host files and filters, SLURM node lists, GPUs, variables."""

import re
import sys
from pathlib import Path

import pytest

from pipeline.launch.layout import (
    Deployment,
    Host,
    expand_nodelist,
    read_hostfile,
    resolve_layout,
    select_hosts,
)
from pipeline.launch.local import forwarded_variables, list_gpus
from pipeline.system.errors import ConfigError

HOSTS = [Host(f"worker-{n}", (0, 1, 2, 3), f"hosts:{n + 1}") for n in range(2)]
SLURM = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "a[1-3]", "SLURM_GPUS_ON_NODE": "gpu:4"}


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HOME", str(tmp_path))


def test_hostfile_is_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("\ufeff# my cluster\n\nworker-0 slots=2\r\n ann@10.0.0.7\tslots=1  # old\n")

    assert read_hostfile(file) == [
        Host("worker-0", (0, 1), f"{file}:3"),
        Host("ann@10.0.0.7", (0,), f"{file}:4"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=1\nb", ":2: "),
        ("a slots=0", ":1: "),
        ("-oProxyCommand=x slots=1", ":1: "),
        ("a;rm slots=1", ":1: "),
        ("a slots=1\nb slots=2\na slots=3", ":3: a is listed twice"),
        ("# nothing\n", " has no hosts"),
    ],
)
def test_invalid_hostfile_raises_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)

    with pytest.raises(ConfigError, match=re.escape(f"{file}{message}")):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
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
    options: dict[str, int | str], expected: dict[str, tuple[int, ...]]
) -> None:
    hosts = select_hosts(HOSTS, **options)  # type: ignore[arg-type]

    assert {host.name: host.slots for host in hosts} == expected


def test_first_host_of_the_hostfile_is_the_master(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("ann@worker-0 slots=4\nworker-1 slots=2\n")

    layout = resolve_layout(Deployment(deployment_type="multi_node", hostfile=hostfile), SLURM)

    assert (layout.launcher, layout.address, layout.port) == ("ssh", "worker-0", 29500)
    assert (layout.processes, str(layout)) == (6, "6 processes each on 2 machines")


@pytest.mark.parametrize(
    ("options", "environment", "option"),
    [
        ({}, {}, "--hostfile"),
        ({"include": "a1"}, SLURM, "--hostfile"),
        ({"num_nodes": 4}, SLURM, "--num-nodes 4"),
    ],
)
def test_missing_option_raises_with_its_name(
    options: dict[str, object], environment: dict[str, str], option: str
) -> None:
    with pytest.raises(ConfigError, match=option):
        resolve_layout(Deployment(deployment_type="multi_node", **options), environment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[1-2]-gpu", ["r1-gpu", "r2-gpu"]),
    ],
)
def test_slurm_node_lists_are_expanded(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


def test_gpus_are_those_of_the_driver_or_visible_before_an_invalid_entry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: a)'\necho 'GPU 1: H200 (UUID: b)'\n")
    tool.chmod(0o755)

    assert list_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-8f,-1,0")
    assert list_gpus() == ["1", "GPU-8f"]


def test_only_variables_of_libraries_are_forwarded() -> None:
    forwarded = ["NCCL_DEBUG", "OMP_NUM_THREADS", "HF_TOKEN", "PYTHONUNBUFFERED", "https_proxy"]
    forwarded += ["RLHF_PIPELINE_KERNELS"]
    others = ["PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "AWS_SECRET_ACCESS_KEY", "XNCCL_DEBUG"]

    assert [*forwarded_variables(dict.fromkeys([*forwarded, *others], "x"))] == forwarded


def test_ray_deployment_without_ray_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r"needs the package ray: pip install"):
        resolve_layout(Deployment(deployment_type="ray", num_nodes=2, num_gpus=8))
