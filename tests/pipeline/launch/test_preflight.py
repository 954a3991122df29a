"""The look at all machines, each of which is this one, reached through what stands for ssh."""

import socket
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.deployment import Deployment
from pipeline.launch.layout import layout
from pipeline.launch.preflight import Check, insist, look
from tests.faults.jobs import free_port


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """Runs the line here, after a greeting; `down` can't be reached."""
    program = tmp_path / "ssh"
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = down ]; then echo "ssh: connect to host down: No route" >&2; exit 255; fi\n'
        'echo "Welcome to $1"\nexec sh -c "$2"\n'
    )
    program.chmod(0o755)
    return program


def check(directory: Path, ssh: Path, *hosts: str, **options: object) -> Check:
    file = directory / "hosts"
    file.write_text("".join(f"{host} slots=1\n" for host in hosts))
    deployment = Deployment(
        deployment_type="multi_node",
        hostfile=file,
        ssh_command=str(ssh),
        **{"master_addr": "127.0.0.1", "master_port": free_port(), **options},  # type: ignore[arg-type]
    )
    return look(layout(deployment, {}), deployment, directory / "out" / "deep")


def test_machines_that_can_be_used_are_shown_and_nothing_is_left(tmp_path: Path, ssh: Path) -> None:
    found = check(tmp_path, ssh, "worker-0", "worker-1")

    assert found.problems == []
    assert [row.split()[0] for row in found.table] == ["machine", "worker-0", "worker-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts", "ssh"]


def test_a_machine_that_cant_be_reached_is_named_with_the_command_to_try(
    tmp_path: Path, ssh: Path
) -> None:
    found = check(tmp_path, ssh, "worker-0", "down")

    assert found.problems == [
        f"down ({tmp_path}/hosts:2) can't be reached: ssh: connect to host down: No route;"
        f" `{ssh} down true` must work without a password"
    ]
    with pytest.raises(ConfigError, match=r"^down "):
        insist(found)


def test_a_port_that_is_taken_is_replaced_unless_it_was_asked_for(
    tmp_path: Path, ssh: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"--master-port {port} is taken on worker-0; choose"):
            check(tmp_path, ssh, "worker-0", master_port=port)


def test_machines_of_an_allocation_are_looked_at_through_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    deployment = Deployment(deployment_type="multi_node", master_addr="127.0.0.1", num_gpus=1)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]"}

    found = look(layout(deployment, slurm), deployment, tmp_path)

    assert found.problems == []
    assert [row.split()[0] for row in found.table] == ["machine", "n1", "n2"]


def test_one_machine_alone_is_looked_at_too(tmp_path: Path) -> None:
    for options in ({}, {"deployment_type": "single_node"}):
        deployment = Deployment(**options)  # type: ignore[arg-type]

        found = look(layout(deployment, {}), deployment, tmp_path)

        assert found.problems == []
        assert found.table[1].startswith("localhost ")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("machine['versions']['torch'] = '1.0'", "torch is 1.0 on worker-1"),
        ("machine['versions']['code'] = 'x'", "the code of this repository on worker-1"),
        ("machine['shared'] = None", "worker-1 does not see this machine's"),
        ("machine['disk_bytes'] = 2**20", "has 1 MiB free on worker-1"),
        ("machine['reaches'] = False", "worker-1 can't reach port"),
        ("machine['own_address'] = None", "worker-1 can't resolve 127.0.0.1"),
        ("machine['time'] += 90", "the clock of worker-1 is"),
        ("machine['gpus'] = [dict(name='x', total_mib=9, used_mib=9)]", "GPU 0 of worker-1"),
    ],
)
def test_a_problem_of_one_machine_is_named(tmp_path: Path, line: str, named: str) -> None:
    """`ssh` changes what the second machine reports."""
    program = tmp_path / "ssh"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, subprocess, sys\n"
        "child = subprocess.Popen(['sh', '-c', sys.argv[2]], stdout=subprocess.PIPE, text=True)\n"
        "for text in child.stdout:\n"
        "    mark, brace, rest = text.partition('{')\n"
        "    machine = json.loads(brace + rest)\n"
        "    if sys.argv[1] == 'worker-1':\n"
        f"        {line}\n"
        "    print(mark + json.dumps(machine), flush=True)\n"
    )
    program.chmod(0o755)

    (problem, *others) = check(tmp_path, program, "worker-0", "worker-1").problems

    assert named in problem or named in others[-1]
