"""A trial: a real run of a step in processes of its own, ended when it has logged enough."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import psutil

from pipeline.autotune.points import Outcome
from pipeline.budget.fallbacks import changed
from pipeline.config import FrozenModelConfig, StepConfig
from pipeline.errors import EXIT_OUT_OF_MEMORY, EXIT_USER_ERROR
from pipeline.launch.child import SIGNALS
from pipeline.signals import EXIT_REQUEUE, STOP_SIGNALS

WARM_UP = 2
"""First steps of a trial, which allocate, compile and read ahead."""

LOOK_SECONDS = 0.1
"""Between two looks at what a trial has logged."""

FAMILY_SECONDS = 1.0
"""Between two looks at which processes belong to it."""

LEAVING_SECONDS = 5.0
"""Time in which a trial may end in order after it is asked to stop; then it is killed."""

PATIENCE_SECONDS = 30.0
"""Time in which a trial ends by itself after it is asked to stop."""


@dataclass(frozen=True)
class Trial:
    """How a trial ended."""

    outcome: Outcome
    tokens_per_second: tuple[float, ...]
    memory_gb: float | None
    seconds: float
    message: str


def trial_settings(config: StepConfig, output_dir: Path, *, steps: int, world: int) -> StepConfig:
    """The step's settings for a few steps and nothing beside them.

    What a step does before and after its loop - evaluations, comparisons, the measuring of scores -
    is as short as can be; checkpoints are left out. The steps themselves are those of the real run.
    """
    values: dict[str, object] = {
        "output_dir": output_dir,
        "max_steps": WARM_UP + steps,
        "eval_every": 0,
        "keep_best": False,
        "log_every": 1,
        "save_every": None,
        "resume": False,
        "trackers": (),
        "data.max_eval_rows": world,
    }
    of_some_steps: dict[str, object] = {
        "patience": None,
        "normalization_prompts": 2,
        "samples_every": WARM_UP + steps + 1,
        "base": FrozenModelConfig(),
        "critic_warmup_steps": 0,  # the steps after it are the run's
        "guards": (),  # which may need checkpoints
    }
    names = {each.name for each in fields(config)}
    values |= {name: value for name, value in of_some_steps.items() if name in names}
    return changed(config, values)


def run_trial(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    metrics: Path,
    log: Path,
    steps: int,
    timeout_seconds: float,
) -> Trial:
    """Run a step until it has logged its warm-up and that many steps more, or has failed.

    Whatever happens, none of its processes is left.

    Args:
        command: runs the step.
        environment: of its processes.
        metrics: the metrics.jsonl that it writes.
        log: receives its output.
        steps: to be measured.
        timeout_seconds: after which it is ended.

    Raises:
        SystemExit: a scheduler's signal stops this process; the code is 75.
        KeyboardInterrupt: Ctrl-C did, or a closed terminal.
    """
    began = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    timed_out = False
    with log.open("wb") as output, _Interruption() as interruption:
        with _child(command, environment, output) as family:
            while family.child.poll() is None and len(_lines(metrics)) < WARM_UP + steps:
                timed_out = time.monotonic() - began > timeout_seconds
                if timed_out or interruption.signal is not None:
                    break
                family.look()
                time.sleep(LOOK_SECONDS)
            code = family.child.poll()
        interruption.obey()
    lines = _lines(metrics)[WARM_UP : WARM_UP + steps]
    measured = len(lines) == steps
    rates = tuple(float(line["tokens_per_second"]) for line in lines)
    return Trial(
        outcome="measured" if measured else "too slow" if timed_out else _outcome(code),
        tokens_per_second=rates if measured else (),
        memory_gb=max((line.get("memory_gb", 0.0) for line in lines), default=None),
        seconds=round(time.monotonic() - began, 3),
        message="" if measured else _last_words(log),
    )


class _Family:
    """A child process and all that descend from it, also when it has died before them."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self._looked_at = 0.0
        self._descendants: set[psutil.Process] = set()

    def look(self) -> None:
        """Note who belongs to it, now and then."""
        if time.monotonic() - self._looked_at > FAMILY_SECONDS:
            self._note()

    def end(self) -> None:
        """Have it end as by Ctrl-C, and by a second one: nothing of a trial is worth saving."""
        self._note()
        for patience in (LEAVING_SECONDS, PATIENCE_SECONDS):
            if self.child.poll() is None:
                self.child.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.child.wait(patience)
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        for process in self._descendants:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._descendants, timeout=PATIENCE_SECONDS)

    def _note(self) -> None:
        self._looked_at = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            self._descendants |= set(psutil.Process(self.child.pid).children(recursive=True))


@contextmanager
def _child(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> Iterator[_Family]:
    family = _Family(
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    )
    try:
        yield family
    finally:
        family.end()


class _Interruption:
    """Context in which the signals that would end this process are only noted.

    So no child is left behind by one that arrives while it is being started.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "_Interruption":
        # What our own caller has us ignore, as nohup does with SIGHUP, stays ignored.
        heard = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def obey(self) -> None:
        """Stop, if that was requested."""
        if self.signal in STOP_SIGNALS:
            raise SystemExit(EXIT_REQUEUE)
        if self.signal is not None:
            raise KeyboardInterrupt

    def _note(self, number: int, _frame: object) -> None:
        self.signal = signal.Signals(number)


def _outcome(code: int | None) -> Outcome:
    """What an exit code stands for; -n or 128 + n where signal n ended it."""
    if code == EXIT_OUT_OF_MEMORY:
        return "out of memory"
    if code == EXIT_USER_ERROR:
        return "refused"
    return "killed" if code in (-signal.SIGKILL, 128 + signal.SIGKILL) else "failed"


def _lines(metrics: Path) -> list[dict[str, Any]]:
    """What the step has logged of its optimizer steps; a last line may be half written."""
    try:
        text = metrics.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [line for line in map(json.loads, whole) if "tokens_per_second" in line]


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
