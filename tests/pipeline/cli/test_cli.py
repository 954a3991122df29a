import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from pipeline.cli.options import parse_step, run_main, write_config
from pipeline.system.errors import EXIT_DISK_FULL, EXIT_OUT_OF_MEMORY, DataError
from pipeline.system.threads import SPINNING
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from tests.sources import ROOT


def test_a_step_takes_a_deepspeed_file_between_its_files_and_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},'
        ' "gradient_clipping": 0.5, "steps_per_print": 1}'
    )
    (tmp_path / "own.yaml").write_text("{batch_size: 7, epochs: 2, model: {zero_stage: 1}}")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")

    files = ["--zero-config", str(tmp_path / "ds.json"), "--config", str(tmp_path / "own.yaml")]
    config = parse_step(SFTConfig, [*files, "--model.optim.max_grad_norm", "2"])

    assert (config.batch_size, config.epochs, config.model.zero_stage) == (8, 2.0, 2)
    assert config.model.optim.max_grad_norm == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"these keys of {tmp_path}/ds.json have no effect here: steps_per")
    assert said.out == ""


@pytest.mark.parametrize("config_class", [SFTConfig, RewardConfig, PPOConfig])
def test_what_is_written_repeats_the_run(tmp_path: Path, config_class: type) -> None:
    config = config_class(seed=7, output_dir=tmp_path)
    write_config(config, tmp_path / "deep" / "config.yaml")

    assert parse_step(config_class, ["--config", str(tmp_path / "deep" / "config.yaml")]) == config
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["config.yaml"]


def exit_code_after(ending: BaseException | None) -> object:
    """That of a command whose function ends so."""

    def main(_argv: object) -> None:
        if ending is not None:
            raise ending

    with pytest.raises(SystemExit) as end:
        run_main(main, [])
    return end.value.code


@pytest.mark.parametrize(
    ("ending", "code", "printed"),
    [
        (None, 0, ""),
        (DataError("rows.jsonl\nis empty"), 2, "error: rows.jsonl is empty\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("stopped at step 3"), 130, "stopped at step 3\n"),
    ],
)
def test_a_command_ends_with_its_code_and_at_most_one_line(
    ending: BaseException | None, code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_after(ending) == code
    assert capsys.readouterr().err == printed


def test_only_the_first_process_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")

    assert exit_code_after(DataError("no rows")) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("cannot allocate 7 GiB"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"),
    ],
    ids=["Python", "CUDA", "CPU"],
)
def test_where_memory_ran_out_the_exit_code_says_so(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_after(error) == EXIT_OUT_OF_MEMORY
    assert capsys.readouterr().err.startswith("out of memory: ")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/config.json"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_sentence_with_an_exit_code_of_its_own(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_after(error) == EXIT_DISK_FULL
    assert capsys.readouterr().err == f"error: the disk is full: {error}; free some space\n"


def test_ctrl_c_while_a_step_imports_pytorch_is_no_traceback() -> None:
    command = [sys.executable, "-m", "step1_sft.train", "--data.max_eval_rows", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as step:
        maps = Path(f"/proc/{step.pid}/maps")
        while "libtorch" not in maps.read_text():
            time.sleep(0.01)
        step.send_signal(signal.SIGINT)
        _, errors = step.communicate(timeout=60)

    assert (step.returncode, errors) == (130, "interrupted\n")


def test_a_step_shortens_the_spinning_of_threads_before_it_imports_pytorch() -> None:
    program = (
        "from pipeline.cli.options import before_imports, os, sys\n"
        "before_imports(object)\n"
        "print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING}
    said = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=environment)
    assert said in (b"False 0\n", b"False 10000\n")
