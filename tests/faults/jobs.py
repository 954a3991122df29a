"""Jobs of a few seconds: one step on toy models, in processes that can be killed and started again.

`Forked` is for many jobs: its processes are forked from a server with all imports done, and run
the step's `train`. `Command` is what a user types, including the launcher.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from transformers import AutoTokenizer

from pipeline.cli.options import run_main, write_config
from pipeline.config import DataConfig, LoraConfig, StepConfig, TextDataConfig
from pipeline.data.store.pack import pack
from pipeline.data.store.token_file import read_vocabulary
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.parallel.mesh import current_mesh
from pipeline.parallel.process_group import process_group
from pipeline.system import faults
from pipeline.system.logs import configure_logging
from pipeline.system.signals import EXIT_INTERRUPTED, EXIT_REQUEUE
from pipeline.watchdog.process import watch_processes
from step0_pretrain.config import PretrainConfig
from tests.distributed import PROCESSES
from tests.pipeline.data.store.corpus import write_rows
from tests.pipeline.engine.checkpoint.saving import newest
from tests.sources import ROOT
from tests.step3_ppo.toy import save_models
from tests.test_resume import (
    COMMON,
    CONFIGS,
    model_config,
    parse_config,
    read_checkpoint,
    read_exported,
    read_metrics,
    train_step,
)

PEER_SECONDS = 10
"""Limit for a process to notice that another has died, or for a job to end after a fault."""


ROWS = 60
WORDS = ("sun", "moon", "rain", "wind", "bread", "water", "stone", "river", "cloud", "night")


def write_inputs(directory: Path) -> None:
    """Write random models and a few rows, so that every pass is short."""
    save_models(directory)
    draw = random.Random(1)

    def sentence() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 6)))

    with (directory / DATA).open("w") as file:
        for _ in range(ROWS):
            row = {name: sentence() for name in ("prompt", "chosen", "rejected")}
            file.write(json.dumps(row) + "\n")
    texts = [" ".join(sentence() for _ in range(draw.randint(1, 20))) for _ in range(ROWS)]
    write_rows(directory / "texts.jsonl", texts)
    tokenizer = AutoTokenizer.from_pretrained(directory / "actor")
    pack([directory / "texts.jsonl"], read_vocabulary(tokenizer, "actor"), directory / TEXTS)


DATA, TEXTS = "rows.jsonl", "texts"


def pretrain(inputs: Path, **changes: Any) -> PretrainConfig:
    common = {name: value for name, value in COMMON.items() if name != "data"}
    return PretrainConfig(
        output_dir=inputs, model=model_config(inputs / "actor", **changes), **common
    )


JOBS = {**CONFIGS, "pretrain": pretrain}


def small_job(inputs: Path, step: str, **changes: Any) -> Any:
    """Return a job with dropout, accumulation, warm-up, loss scale and evaluations."""
    data: DataConfig = DataConfig(path=(str(inputs / DATA),), max_eval_rows=6, max_length=64)
    if step == "pretrain":
        data = TextDataConfig(path=(str(inputs / TEXTS),), max_eval_rows=6, max_length=64)
    model: dict[str, Any] = {"zero_stage": 3, "precision": "fp16"}
    if step != "ppo":  # where dropout would change the ratio
        model["lora"] = LoraConfig(rank=2, dropout=0.1)
    common = {"max_steps": 8, "save_every": 1, "keep_last": 1000, "eval_every": 4}
    return replace(JOBS[step](inputs, **model), **{"data": data, **common, **changes})


class Forked:
    """The processes of a job, each with a log; those still alive on exit are killed."""

    def __init__(
        self, config: StepConfig, *, world_size: int = 2, fault: str | None = None
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rendezvous = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(world_size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self.logs = [Path(self._scratch.name) / f"rank {rank}.log" for rank in range(world_size)]
        self.processes = [
            PROCESSES.Process(
                target=_run_rank,
                args=(config, {**rendezvous, "RANK": str(rank)}, fault, log),
                daemon=True,
            )
            for rank, log in enumerate(self.logs)
        ]

    def __enter__(self) -> "Forked":
        self.began = time.monotonic()
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        self._scratch.cleanup()

    def wait(self, seconds: float = 60) -> list[int]:
        """Wait for the exit codes; -n for a process that signal n ended."""
        non_failures = (None, 0, EXIT_REQUEUE, EXIT_INTERRUPTED)
        end = time.monotonic() + seconds
        sent = False
        while any(process.exitcode is None for process in self.processes):
            assert time.monotonic() < end, f"it did not end within {seconds:g} s:\n{self.output()}"
            if not sent and any(process.exitcode not in non_failures for process in self.processes):
                sent = True
                for process in self.processes:
                    process.terminate()
            time.sleep(0.005)
        return [process.exitcode or 0 for process in self.processes]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the processes that are alive."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def output(self) -> str:
        """Return the output of all processes."""
        return "\n".join(log.read_text() for log in self.logs if log.exists())


def _run_rank(
    config: StepConfig, environment: dict[str, str], fault: str | None, log: Path
) -> None:
    with log.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    torch.set_num_threads(1)
    os.environ.update(environment)
    faults._faults = [tuple(word.split(":")) for word in (fault or "").split(",") if word]

    def main(_argv: Sequence[str]) -> None:
        with process_group(watch_processes):
            configure_logging(is_main=current_mesh().is_main)
            train_step(config)

    run_main(main, [])


def run_forked(config: StepConfig, **options: Any) -> list[int]:
    """Run a job and return its exit codes."""
    with Forked(config, **options) as job:
        return job.wait()


class Command:
    """A command in a new session, which is killed on exit if it is still running."""

    def __init__(self, *args: str, fault: str | None = None, **environment: str) -> None:
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        inherited = {name: value for name, value in os.environ.items() if name != "FAULT"}
        self.process = subprocess.Popen(
            [sys.executable, *args],
            cwd=ROOT,
            env={**inherited, **environment, **({"FAULT": fault} if fault else {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        self._log.close()

    def kill(self) -> None:
        """Send SIGKILL to the command and its descendants, as if the machine were lost."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in _descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float = 120) -> int:
        """Wait for the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {seconds:g} s:\n{self.output()}") from None

    def output(self) -> str:
        """Return the output so far."""
        return Path(self._log.name).read_text()


def _descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def step_args(config: StepConfig, *, processes: int | None = 2) -> list[str]:
    """Return the command line of a step, and write its settings next to its output."""
    file = config.output_dir.with_name(f"{config.output_dir.name}.yaml")
    write_config(config, file)
    modules = {
        "PretrainConfig": "step0_pretrain",
        "SFTConfig": "step1_sft",
        "RewardConfig": "step2_reward",
        "PPOConfig": "step3_ppo",
    }
    args = ["-m", f"{modules[type(config).__name__]}.train", "--config", str(file)]
    if processes is None:
        return args
    launcher = ["-m", "pipeline.launch.torchrun", "--standalone"]
    return [*launcher, "--nproc-per-node", str(processes), *args]


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


TIME_KEYS = ("seconds", "seconds_trained", "logged_at", "metrics_bytes")
"""State that depends on the clock, or on the number of digits of times."""


def assert_prefix(out: Path, reference: Path) -> int:
    """Assert that the newest checkpoint equals the reference's bitwise; return its step."""
    checkpoint, unusable = newest(out / "checkpoints")
    assert not unusable  # a kill leaves no unusable checkpoints
    if checkpoint is None:
        return 0
    step = checkpoint.step
    expected = Checkpoint.open(reference / "checkpoints" / f"step_{step:08d}")
    assert _state(checkpoint) == _state(expected)
    assert_same_tensors(read_checkpoint(out, step), read_checkpoint(reference, step))
    return step


def _state(checkpoint: Checkpoint) -> dict[str, Any]:
    state = dict(checkpoint.state)
    run_state = {k: v for k, v in state["parts"]["run"].items() if k not in TIME_KEYS}
    return {**state, "parts": {**state["parts"], "run": run_state}}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [key for key, tensor in actual.items() if not torch.equal(tensor, expected[key])]
    assert not different, f"these differ: {different}"


def assert_same_end(out: Path, reference: Path, *, step: int, elastic: bool = False) -> None:
    """Assert that both runs have equal last checkpoints, metrics and exported models.

    With a different number of processes (`elastic`), random number generators, which belong to
    processes, are not compared, and the laboratory's figures have a tolerance: each process
    scores different rows together, which rounds differently.
    """
    assert read_metrics(out) == read_metrics(reference)
    tensors, expected_tensors = read_checkpoint(out, step), read_checkpoint(reference, step)
    files, expected = read_exported(out), read_exported(reference)
    assert {Path(name).name for name in files} >= {"model.safetensors", "config.json"}
    if elastic:
        tensors, expected_tensors = map(_without_generators, (tensors, expected_tensors))
        assert parse_config(files.pop("config.json")) == parse_config(expected.pop("config.json"))
        figures, expected_figures = (
            _flatten(json.loads(exported.pop("lab.json", b"{}"))) for exported in (files, expected)
        )
        assert figures.keys() == expected_figures.keys()
        for name, value in expected_figures.items():
            expected_value = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert figures[name] == expected_value, name
    assert_same_tensors(tensors, expected_tensors)
    assert files.keys() == expected.keys()
    different = [name for name, content in files.items() if content != expected[name]]
    assert not different, f"these differ: {different}"


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten JSON to its numbers and texts, by path."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {path: value}
    children = [_flatten(child, f"{path}/{key}") for key, child in value.items()]
    return {key: figure for part in children for key, figure in part.items()}


def _without_generators(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("random/")}
