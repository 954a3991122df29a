"""The look at all machines, each of which is this one, reached through what stands for ssh."""

import socket
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.deployment import Deployment
from pipeline.launch.layout import layout
from pipeline.launch.preflight import Check, insist, look
from pipeline.launch.probe import code_hash, gpus
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


def test_a_directory_that_a_machine_does_not_have_is_named(tmp_path: Path) -> None:
    elsewhere = tmp_path / "ssh"
    elsewhere.write_text(
        '#!/bin/sh\nexec sh -c "$(echo "$2" | sed \'s|^cd [^ ]*|cd /nowhere|\')"\n'
    )
    elsewhere.chmod(0o755)

    found = check(tmp_path, elsewhere, "worker-0")

    assert found.problems == [
        "worker-0 does not have the directory that this command runs in; start it in one that is"
        " shared by all machines, at the same path"
    ]


def test_a_port_that_is_taken_is_replaced_unless_it_was_asked_for(
    tmp_path: Path, ssh: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"--master-port {port} is taken on worker-0; choose"):
            check(tmp_path, ssh, "worker-0", master_port=port)


def test_the_usual_port_is_replaced_where_it_is_taken(
    tmp_path: Path, ssh: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", 29500))
            taken.listen()
        except OSError:  # somebody else's, which is as good
            pass

        found = check(tmp_path, ssh, "worker-0", "worker-1", master_port=None)

    assert found.problems == []
    assert found.where.port != 29500
    assert capfd.readouterr().err.startswith("port 29500 of worker-0 is taken; processes meet at")


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


def test_gpus_are_read_as_the_driver_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 4'\necho 'NVIDIA H200, [N/A], 4'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert [(gpu.name, gpu.total_mib, gpu.used_mib) for gpu in gpus()] == [
        ("NVIDIA H200", 143771, 4)
    ]


def test_the_code_is_known_by_its_content() -> None:
    assert code_hash() == code_hash()
    assert len(code_hash()) == 64
