import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from pipeline.cli.options import parse_step, run_main, write_config
from pipeline.system.errors import EXIT_DISK_FULL, EXIT_OUT_OF_MEMORY, DataError
from pipeline.system.threads import SPIN_VARIABLES
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from tests.sources import ROOT


def test_deepspeed_file_overrides_config_and_options_override_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},'
        ' "gradient_clipping": 0.5, "steps_per_print": 1}'
    )
    (tmp_path / "config.yaml").write_text("{batch_size: 7, epochs: 2, model: {zero_stage: 1}}")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")

    files = ["--zero-config", str(tmp_path / "ds.json"), "--config", str(tmp_path / "config.yaml")]
    config = parse_step(SFTConfig, [*files, "--model.optim.max_grad_norm", "2"])

    assert (config.batch_size, config.epochs, config.model.zero_stage) == (8, 2.0, 2)
    assert config.model.optim.max_grad_norm == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"ignored keys in {tmp_path}/ds.json: steps_per")
    assert output.out == ""


@pytest.mark.parametrize("config_class", [SFTConfig, RewardConfig, PPOConfig])
def test_written_config_parses_to_the_same_settings(tmp_path: Path, config_class: type) -> None:
    config = config_class(seed=7, output_dir=tmp_path)
    write_config(config, tmp_path / "deep" / "config.yaml")

    assert parse_step(config_class, ["--config", str(tmp_path / "deep" / "config.yaml")]) == config
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["config.yaml"]


def get_exit_code(exception: BaseException | None) -> object:
    """Exit code of a command whose function raises this exception."""

    def main(_argv: object) -> None:
        if exception is not None:
            raise exception

    with pytest.raises(SystemExit) as exit_info:
        run_main(main, [])
    return exit_info.value.code


@pytest.mark.parametrize(
    ("exception", "code", "printed"),
    [
        (None, 0, ""),
        (DataError("rows.jsonl\nis empty"), 2, "error: rows.jsonl is empty\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("stopped at step 3"), 130, "stopped at step 3\n"),
    ],
)
def test_command_exits_with_its_code_and_at_most_one_line(
    exception: BaseException | None, code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get_exit_code(exception) == code
    assert capsys.readouterr().err == printed


def test_only_rank_0_prints_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")

    assert get_exit_code(DataError("no rows")) == 2
    assert capsys.readouterr().err == ""


SHORTAGES = {
    MemoryError("cannot allocate 7 GiB"): EXIT_OUT_OF_MEMORY,
    torch.OutOfMemoryError("CUDA out of memory"): EXIT_OUT_OF_MEMORY,
    RuntimeError("DefaultCPUAllocator: can't allocate memory"): EXIT_OUT_OF_MEMORY,
    torch.AcceleratorError("CUDA error: out of memory"): EXIT_OUT_OF_MEMORY,
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"): EXIT_OUT_OF_MEMORY,
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/config.json"): EXIT_DISK_FULL,
    SafetensorError("I/O error: No space left on device (os error 28)"): EXIT_DISK_FULL,
}


@pytest.mark.parametrize(("error", "code"), SHORTAGES.items())
def test_lack_of_memory_or_disk_space_exits_with_its_own_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert get_exit_code(error) == code
    start = "out of memory" if code == EXIT_OUT_OF_MEMORY else "error: the disk is full"
    assert capsys.readouterr().err.startswith(f"{start}: {error}")


@pytest.mark.parametrize(
    ("command", "module"),
    [("-m step1_sft.train", "torch.version"), ("train.py", "yaml"), ("chat.py", "yaml")],
)
def test_ctrl_c_during_imports_prints_no_traceback(command: str, module: str) -> None:
    argv = [sys.executable, "-X", "importtime", *command.split()]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().endswith(f" {module}\n"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        lines = process.stderr.read().splitlines()

    assert process.returncode == 130
    assert [line for line in lines if not line.startswith("import time:")] == ["interrupted"]


def test_openmp_spin_count_is_set_before_pytorch_is_imported() -> None:
    program = (
        "from pipeline.cli.options import prepare_imports, os, sys\n"
        "prepare_imports(object)\n"
        "print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SPIN_VARIABLES}
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=environment)
    assert output in (b"False 0\n", b"False 10000\n")
