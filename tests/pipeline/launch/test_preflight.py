"""The check of all machines, which are this one, reached through a fake ssh."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.launch.layout import Deployment, resolve_layout
from pipeline.launch.preflight import check_machines
from pipeline.system.errors import ConfigError


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """A fake ssh that runs the line here after a greeting; `down` can't be reached."""
    program = tmp_path / "ssh"
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = down ]; then echo "ssh: connect to host down: No route" >&2; exit 255; fi\n'
        'echo "Welcome to $1"\nexec sh -c "$2"\n'
    )
    program.chmod(0o755)
    return program


def get_problems(
    directory: Path, ssh: Path, capsys: pytest.CaptureFixture[str], *hosts: str
) -> list[str]:
    file = directory / "hosts"
    file.write_text("".join(f"{host} slots=1\n" for host in hosts))
    deployment = Deployment(deployment_type="multi_node", hostfile=file, ssh_command=str(ssh))
    with pytest.raises(ConfigError) as error:
        check_machines(resolve_layout(deployment, {}), deployment, directory / "out" / "deep")
    return [*capsys.readouterr().err.splitlines(), str(error.value)]


def test_unreachable_machine_is_reported_with_the_command_to_try(
    tmp_path: Path, ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get_problems(tmp_path, ssh, capsys, "worker-0", "down") == [
        f"down ({tmp_path}/hosts:2) can't be reached: ssh: connect to host down: No route;"
        f" `{ssh} down true` must work without a password"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("machine['versions']['torch'] = '1.0'", f"worker-1 and {version('torch')} on worker-0"),
        (
            "machine['versions']['the code of this repository'] = 'x'",
            "the code of this repository is x on worker-1",
        ),
        ("machine['shared'] = False", "worker-1 can't access this machine's"),
        ("machine['gpus'] = [('x', 9, 9)]", "GPU 0 of worker-1"),
    ],
)
def test_problem_of_one_machine_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    """The first machine does not report, and the fake ssh changes the report of the last one."""
    program = tmp_path / "ssh"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, subprocess, sys\n"
        "mark, brace, rest = subprocess.getoutput(sys.argv[2]).partition('{')\n"
        "machine = json.loads(brace + rest)\n"
        "if sys.argv[1] == 'worker-1':\n"
        f"    {line}\n"
        "print(mark + json.dumps(machine) if sys.argv[1] != 'down' else '')\n"
    )
    program.chmod(0o755)

    problems = get_problems(tmp_path, program, capsys, "down", "worker-0", "worker-1")

    assert any(message in problem for problem in problems)
