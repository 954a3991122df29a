from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.environment import passed_on, read_env_file


@pytest.fixture(autouse=True)
def _nobodys_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)


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


def test_deepspeeds_file_is_read_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_env_file(None) == {}

    (tmp_path / ".deepspeed_env").write_text("A=1\n")
    assert read_env_file(None) == {"A": "1"}

    (tmp_path / "other").write_text("A=2\n")
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "other"))
    assert read_env_file(None) == {"A": "2"}


@pytest.mark.parametrize("line", ["hf_abcdef", "MY KEY=hf_abcdef", "=hf_abcdef"])
def test_a_wrong_line_is_named_by_its_place_and_not_shown(tmp_path: Path, line: str) -> None:
    file = tmp_path / "env"
    file.write_text(f"A=1\n{line}\n")

    with pytest.raises(ConfigError) as error:
        read_env_file(file)

    assert str(error.value) == f"{file}:2: a line is NAME=VALUE, without blanks around ="


def test_a_file_that_isnt_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--env-file .*nowhere can't be read"):
        read_env_file(tmp_path / "nowhere")
