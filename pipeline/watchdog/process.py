"""Watches the processes of a job: who failed, who is gone, who hangs.

A thread of each process says about once a second where its process is, and looks for what others
have to say. A process that fails shows its error first and leaves a clause for the others, who say
in one line why they stop; a process that hangs is named, and all show where they are. None outlives
the job: the thread ends a process that doesn't end by itself.
"""

import faulthandler
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import psutil
import torch.distributed as dist

from pipeline.errors import (
    EXIT_DIVERGED,
    EXIT_USER_ERROR,
    DivergedError,
    JobFailed,
    UserError,
    exit_code,
)
from pipeline.parallel.mesh import current_mesh
from pipeline.position import HERE, Collective, DesyncError
from pipeline.watchdog.attribution import Attribution, Identity
from pipeline.watchdog.heartbeats import Failure, Heartbeats, Sighting

TICK_SECONDS = 1.0
HEARING_SECONDS = 2.0
"""For which a process whose collective failed waits for the reason."""

SPEAKING_SECONDS = 4.0
"""For which a process that failed waits until the others have heard of it, before it goes."""

GRACE_SECONDS = 5.0
"""For a process to end by itself once the job has failed; half of it where processes hang."""

SILENCE_SECONDS = 60.0
"""After which a process of another machine counts as gone, where one waits for it."""

OF_COLLECTIVES = re.compile(
    r"gloo|nccl|connection (closed|reset) by peer|timed out waiting|broken pipe", re.IGNORECASE
)

ONE_SENTENCE = (UserError, DivergedError)
"""Errors that all processes may meet together, and whose sentence says everything."""


@contextmanager
def watching(timeout_seconds: float) -> Iterator[None]:
    """Watch the processes of the job, which all enter together.

    Raises:
        JobFailed: an error that has been shown, or was the consequence of another process's.
    """
    watchdog = Watchdog(timeout_seconds)
    watchdog.start()
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever it is, the others must know
        raise JobFailed(watchdog.fail(error)) from None
    finally:
        watchdog.stop()


class Watchdog:
    """The watch of one process. All processes construct it together."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout = timeout_seconds
        self.tick = min(TICK_SECONDS, timeout_seconds / 4)
        world = self.world = current_mesh().world
        self.rank = world.rank
        process = psutil.Process()
        self.own = Identity(os.uname().nodename, process.pid, process.create_time())
        self.heartbeats = Heartbeats.of_job(world.gather_objects(uuid.uuid4().hex)[0], world)
        self.attribution = Attribution(self.heartbeats, self.own, world)
        self._beat = 0
        self._place = ((0, 0), time.monotonic())
        """Numbers of the collective and transfer that the process is at, and since when."""
        self._next_look = 0.0
        self._history_published = 0
        self._armed_at = -float("inf")
        self._speaking = threading.RLock()
        self._has_spoken = False
        self._found: Failure | None = None
        """What this process was the first to find."""
        self._over = threading.Event()
        self._publish: Callable[[Collective], None] | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._handles_sigterm = False

    def start(self) -> None:
        """Begin to watch."""
        # gloo ends processes where they are not in step.
        if dist.get_backend(self.world.process_group) == "gloo":
            publish = Heartbeats.of_job(self.heartbeats.job, self.world).publish_last
            HERE.listeners.append(publish)
            self._publish = publish
        # A collective that failed fails again where the engine cleans up; the first error counts.
        warnings.filterwarnings("ignore", message="module forward hook with ``always_call")
        self._appear()
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._stop_on_signal)
            self._handles_sigterm = True
        self._thread.start()

    def stop(self) -> None:
        """End the watch; the others no longer miss this process."""
        self._over.set()
        self._thread.join(timeout=2 * TICK_SECONDS)
        self._appear(left=True)
        if self._publish is not None and self._publish in HERE.listeners:
            HERE.listeners.remove(self._publish)
            self._publish = None
        faulthandler.cancel_dump_traceback_later()
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._stop_on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # What this process has to say

    def fail(self, error: Exception) -> int:
        """Show the error, or what caused it; the exit code."""
        if _is_of_collectives(error):
            failure = self._cause(HEARING_SECONDS) or self._agreed(self._blame(error), error)
            self._speak(failure, error)
            self._linger(living=self.attribution.living() if failure is self._found else 0)
            return failure.code
        own = Failure(self.rank, f"rank {self.rank} failed: {_summary(error)}", exit_code(error))
        first = self.heartbeats.claim()
        other = None if first else self._posted(SPEAKING_SECONDS)
        if other is not None and other.rank != self.rank:
            self._fail_as_well(error, other)
            return other.code
        with self._speaking:
            self._has_spoken = True
            _show(error)
        self.heartbeats.post(own)
        self._linger(living=self.attribution.living())
        return own.code

    def _fail_as_well(self, error: Exception, other: Failure) -> None:
        """Say that there is a second failure, unless it is the same input that all found wrong."""
        same = isinstance(error, ONE_SENTENCE) and other.what.endswith(_summary(error))
        with self._speaking:
            if not self._has_spoken and not same:
                _say(f"rank {self.rank} failed as well: {_summary(error)}")
            self._has_spoken = True
        self.heartbeats.acknowledge()

    def _blame(self, error: Exception) -> Failure:
        """What a collective that failed here tells of the others."""
        found = self.attribution.elsewhere() or self.attribution.left()
        if found is not None:
            return found
        if "timed out" in str(error).lower():
            late = self.attribution.late(time.monotonic() - self._place[1])
            if late is not None:
                return late
        if isinstance(error, DesyncError):
            return Failure(self.rank, str(error), 1, stacks=True)
        return Failure(
            self.rank, f"rank {self.rank} failed at {HERE.last}: {_summary(error)}", 1, stacks=True
        )

    def _speak(self, failure: Failure, error: Exception | None = None) -> None:
        """Say once why this process stops, with its stacks where they may help."""
        with self._speaking:
            if self._has_spoken:
                return
            self._has_spoken = True
            own = f"rank {self.rank} "
            lines = failure.what
            if failure is not self._found:
                cause = failure.what
                cause = f"it {cause.removeprefix(own)}" if cause.startswith(own) else cause
                lines = f"{own}stopped because {cause}"
            if failure.stacks:
                lines += f"\n{own}is here:\n{_stacks() if error is None else _traceback(error)}"
            _say(lines)
        if failure is not self._found:
            self.heartbeats.acknowledge()

    def _agreed(self, failure: Failure, error: Exception | None = None) -> Failure:
        """This failure, published immediately, unless another process published one first."""
        if self.heartbeats.claim():
            self._found = failure
            self._speak(failure, error)
            self.heartbeats.post(failure)
            return failure
        return self._posted(HEARING_SECONDS) or failure

    def _posted(self, patience: float) -> Failure | None:
        """What another process has posted, or posts soon."""
        deadline = time.monotonic() + patience
        while (failure := self.heartbeats.failure()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return failure

    def _cause(self, patience: float) -> Failure | None:
        """Why others have ended: what they reported, or that they reported nothing."""
        deadline = time.monotonic() + patience
        while True:
            found = self.heartbeats.failure()
            if found is None and (ended := self.attribution.ended()) is not None:
                found = self._agreed(ended)
            if found is not None or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def _linger(self, *, living: int) -> None:
        """Stay until so many others have heard, and until a launcher knows who ended first.

        When this process ends, the launcher may end the others at once.
        """
        deadline = time.monotonic() + SPEAKING_SECONDS
        while time.monotonic() < deadline and (
            self.heartbeats.acknowledged() < living or self.attribution.unreaped()
        ):
            time.sleep(0.02)

    def _stop_on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """SIGTERM: torchrun ends all processes when one has failed; a scheduler at any time."""
        failure = self._cause(0)
        if failure is not None:
            self._speak(failure)
            raise JobFailed(failure.code)
        self._appear(left=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    # What the thread does

    def _run(self) -> None:
        while not self._over.wait(self.tick):
            self._arm()
            self._appear()
            failure = self._cause(0) or self._look_around()
            if failure is not None:
                self._obey(failure)
                return

    def _obey(self, failure: Failure) -> None:
        """Say why, give the process time to end, then end it."""
        if failure.code in (EXIT_USER_ERROR, EXIT_DIVERGED):  # which all may be about to meet
            self._over.wait(TICK_SECONDS)
        self._speak(failure)
        if not self._over.wait(GRACE_SECONDS / 2 if failure.stacks else GRACE_SECONDS):
            sys.stderr.flush()
            os._exit(failure.code)

    def _look_around(self) -> Failure | None:
        """Where this process has stood still for long: who keeps it?"""
        now = time.monotonic()
        (number, transfers), since = self._place
        stands = now - since
        if number + transfers == 0:
            return None
        if stands >= self.timeout:
            late = self.attribution.late(stands)
            return late and self._agreed(late)
        if stands < 3 * self.tick:
            self._next_look = 0.0
            return None
        if self._history_published != number:
            self._history_published = number
            self.heartbeats.publish_history(HERE.history())
        if stands < self._next_look:
            return None
        self._next_look = 1.5 * stands  # less and less often: every look asks for all processes
        found = self.attribution.elsewhere() or self.attribution.silent(now, SILENCE_SECONDS)
        return found and self._agreed(found)

    def _appear(self, *, left: bool = False) -> None:
        now = time.monotonic()
        last = HERE.last
        if (last.number, HERE.transfers) != self._place[0]:
            self._place = ((last.number, HERE.transfers), now)
        self._beat += 1
        self.heartbeats.appear(
            Sighting(
                host=self.own.host,
                pid=self.own.pid,
                started=self.own.started,
                number=last.number,
                label=HERE.waits_at or str(last),
                waits_for=list(HERE.waits_for),
                seconds=now - self._place[1],
                beat=self._beat,
                left=left,
            )
        )

    def _arm(self) -> None:
        """Have the process ended, stacks first, should even this thread come to a stand."""
        now = time.monotonic()
        if now - self._armed_at >= self.timeout / 8:
            self._armed_at = now
            faulthandler.dump_traceback_later(self.timeout + GRACE_SECONDS, exit=True, file=2)


def _is_of_collectives(error: Exception) -> bool:
    """Whether the error may be but the consequence of another process's."""
    if isinstance(error, DesyncError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and OF_COLLECTIVES.search(str(error)) is not None


def _summary(error: Exception) -> str:
    """Kind and first line of an error."""
    first = " ".join(str(error).splitlines()[:1])
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _show(error: Exception) -> None:
    """As the command line does: one sentence where that is all, any other with its traceback."""
    if isinstance(error, ONE_SENTENCE):
        _say(f"error: {' '.join(str(error).split())}")
    else:
        _say(_traceback(error))


def _traceback(error: Exception) -> str:
    """As Python shows it, from where the processes have met."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_name in ("watching", "process_group"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _stacks() -> str:
    """The Python stacks of the other threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace").split("\n\n")
    return "\n\n".join(each for each in stacks if not each.startswith("Current thread"))


def _say(text: str) -> None:
    """Lines on standard error, in one piece."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
