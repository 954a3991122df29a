"""Watches the processes of a job: who failed, who is gone, who hangs.

A thread of each process says about once a second where its process is, and another looks for what
others have to say. A process that fails shows its error first and leaves a clause for the others,
who say in one line why they stop; a process that hangs is named, and all show where they are. None
outlives the job: the thread ends a process that doesn't end by itself.
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
from pipeline.watchdog.heartbeats import Failure, Heartbeats
from pipeline.watchdog.lookout import TICK_SECONDS, Lookout

HEARING_SECONDS = 2.0
"""For which a process whose collective failed waits for the reason."""

SPEAKING_SECONDS = 4.0
"""For which a process that failed waits until the others have heard of it, before it goes."""

GRACE_SECONDS = 5.0
"""For a process to end by itself once the job has failed; half of it where processes hang."""

LEAVING_SECONDS = 15.0
"""For which the end of the watch waits for its threads. A request to the store takes up to 5 s, and
a process aborts if its interpreter ends while a thread is amid one."""

POLL_SECONDS = (0.05, 0.5)
"""Between two looks for what another posts, at first and at last: all may be looking."""

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
        world = self.world = current_mesh().world
        self.rank = world.rank
        process = psutil.Process()
        own = Identity(os.uname().nodename, process.pid, process.create_time())
        self.heartbeats = Heartbeats.of_job(world.gather_objects(uuid.uuid4().hex)[0], world)
        self.heartbeats.begin()
        # Whoever has everybody's identity finds what everybody has posted.
        self.attribution = Attribution(self.heartbeats, world.gather_objects(own))
        self.lookout = Lookout(self.attribution, timeout_seconds=timeout_seconds)
        self._armed_at = -float("inf")
        self._speaking = threading.RLock()
        self._has_spoken = False
        self._found: Failure | None = None
        """What this process was the first to find."""
        self._over = threading.Event()
        self._publish: Callable[[Collective], None] | None = None
        self._threads = [
            threading.Thread(target=self._beat, name="heartbeat", daemon=True),
            threading.Thread(target=self._run, name="watchdog", daemon=True),
        ]
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
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._stop_on_signal)
            self._handles_sigterm = True
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the watch; the others no longer miss this process."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=LEAVING_SECONDS)
        self.lookout.beat(left=True)
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
            failure = self._cause(HEARING_SECONDS) or self._blame_first(error)
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

    def _blame_first(self, error: Exception) -> Failure:
        """Blame whom a collective that failed here tells of, unless another process has begun to.

        All may come here at once, and one of them asks the store for all.
        """
        own = f"rank {self.rank} failed at {HERE.last}: {_summary(error)}"
        if not self.heartbeats.claim():
            found = self._posted(SPEAKING_SECONDS)
            return found or Failure(self.rank, own, 1, stacks=True)
        failure = self._blame(error) or Failure(self.rank, own, 1, stacks=True)
        return self._post_found(failure, error)

    def _blame(self, error: Exception) -> Failure | None:
        attribution = self.attribution
        seen = self.heartbeats.sightings(attribution.others())
        alike = [rank for rank in attribution.alike() if rank in seen]
        found = attribution.elsewhere(alike) or attribution.left(seen)
        if found is None and "timed out" in str(error).lower():
            of_alike = {rank: seen[rank] for rank in alike}
            found = attribution.late(of_alike, self.lookout.seconds_here(), 0.0)
        if found is None and isinstance(error, DesyncError):
            found = Failure(self.rank, str(error), 1, stacks=True)
        return found

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

    def _agreed(self, failure: Failure) -> Failure:
        """This failure, published immediately, unless another process published one first."""
        if self.heartbeats.claim():
            return self._post_found(failure)
        return self._posted(HEARING_SECONDS) or failure

    def _post_found(self, failure: Failure, error: Exception | None = None) -> Failure:
        self._found = failure
        self._speak(failure, error)
        self.heartbeats.post(failure)
        return failure

    def _posted(self, patience: float) -> Failure | None:
        """What another process has posted, or posts soon."""
        return _within(patience, self.heartbeats.failure)

    def _cause(self, patience: float) -> Failure | None:
        """Why others have ended: what they reported, or that they reported nothing."""
        return _within(patience, self._cause_now)

    def _cause_now(self) -> Failure | None:
        found = self.heartbeats.failure()
        if found is None and (ended := self.attribution.ended()) is not None:
            found = self._agreed(ended)
        return found

    def _linger(self, *, living: int) -> None:
        """Stay until that many others have heard, and until a launcher knows who ended first.

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
        self.lookout.beat(left=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    # What the threads do

    def _beat(self) -> None:
        while not self._over.wait(self.lookout.pace):
            self.lookout.beat()

    def _run(self) -> None:
        while not self._over.wait(self.lookout.tick):
            self._arm()
            failure = self._cause_now()
            if failure is None and (found := self.lookout.look()) is not None:
                failure = self._agreed(found)
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

    def _arm(self) -> None:
        """Have the process ended, stacks first, should even this thread come to a stand."""
        now = time.monotonic()
        if now - self._armed_at >= self.timeout / 8:
            self._armed_at = now
            faulthandler.dump_traceback_later(self.timeout + GRACE_SECONDS, exit=True, file=2)


def _within(seconds: float, look: Callable[[], Failure | None]) -> Failure | None:
    """What `look` finds at once or within that many seconds."""
    deadline = time.monotonic() + seconds
    pause, longest = POLL_SECONDS
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.2 * pause, longest)
    return found


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
    """Show an error as the command line does: one sentence if that is all, else its traceback."""
    if isinstance(error, ONE_SENTENCE):
        _say(f"error: {' '.join(str(error).split())}")
    else:
        _say(_traceback(error))


def _traceback(error: Exception) -> str:
    """The traceback as Python shows it, from where the processes have met."""
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
