"""Saving while training continues."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.attempt import Attempt, SaveError
from pipeline.engine.checkpoint.base import Traces, traces
from pipeline.engine.checkpoint.commit import (
    clean,
    commit,
    name_latest,
    prune,
    remove,
    verifies,
)
from pipeline.engine.checkpoint.healthy import needed_to_go_back
from pipeline.engine.checkpoint.host_copy import HostCopy, views
from pipeline.engine.checkpoint.layout import Fragment, is_base_name, step_name
from pipeline.engine.checkpoint.manifest import Manifest, library_versions, now
from pipeline.errors import CheckpointError, ConfigError, require
from pipeline.faults import fault_point
from pipeline.files.durable import discard

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """One process's side of saving; all processes make the same calls in the same order.

    Whoever makes one holds the lock of the directory (`RunLock`): what other jobs left in the
    making is deleted. `job` is any text that no other job has, the same on all processes. `bases`
    are frozen weights that its processes know to be in the directory, with their traces. A
    run that may go back does so by `margin` steps at least; what it needs for that is kept as well.

    A save that fails, on whatever process, leaves no trace but a sentence in the log of the first
    one and in `failure`: training continues, the checkpoints before are untouched, and the next
    save tries again.

    Raises:
        ConfigError: the directory can't be made or written to.
    """

    def __init__(
        self,
        root: Path,
        *,
        job: str,
        rank: int,
        world_size: int,
        keep_last: int = 2,
        timeout_seconds: int | float = 600,
        bases: Mapping[str, Traces] | None = None,
        margin: int | None = None,
    ) -> None:
        require(keep_last >= 2, f"keep_last must be 2 or more, not {keep_last}")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", job):
            raise ValueError(f"{job!r} can't be part of a directory's name")
        self.root = root
        self.failure: str | None = None
        """Why the last save failed, as far as this process knows; None if it didn't."""

        self._job = job
        self._rank = rank
        self._world_size = world_size
        self._keep_last = keep_last
        self._margin = margin
        self._timeout_seconds = timeout_seconds
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._count = 0  # of calls: the same on all processes, whatever failed on one
        self._committed: list[int] = []
        self._bases = dict(bases or {})
        self._left: list[Path] = []  # where others may still look for the first one's verdict
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{root} can't be made: {error.strerror}") from error
        require(os.access(root, os.W_OK | os.X_OK), f"{root} can't be written to")
        if rank == 0:
            clean(root, but_job=job)

    def prepare(self, num_bytes: int, *, pinned: bool) -> None:
        """Begin to make the memory for copies ready, so that the first save is as short as others.

        `num_bytes` is what this process will save, about; `pinned` where it comes from a GPU.
        """
        self.wait()

        def work() -> None:
            with suppress(MemoryError, RuntimeError):  # the save itself will say so
                self._copy.prepare(num_bytes, pinned=pinned)

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        document: Mapping[str, Any],
        *,
        base: str | None = None,
    ) -> float:
        """Copy the fragments and begin to write them; the seconds that the caller was held up.

        The file will hold what the tensors hold now. A save still under way is waited for first,
        and a step that this writer has saved is not saved again. `document` is the run's state, as
        JSON; that of the first process is kept. `base` names what `save_base` wrote.
        """
        began = time.perf_counter()
        held_up = 0.0
        self._count += 1
        self.wait()
        if self._committed[-1:] == [step]:
            return time.perf_counter() - began
        self.failure = None
        state = json.loads(json.dumps(document))
        attempt = self._attempt(step_name(step))
        try:
            copies = self._copy.take(fragments)
            problem, needed = None, sum(each.nbytes for each in copies)
        except MemoryError as error:
            copies, problem, needed = [], error, 0

        def work() -> None:
            fault_point("checkpoint.before_write")
            if problem is not None:
                raise problem
            attempt.write(copies)
            if self._rank == 0:
                self._finish(attempt, self._manifest(attempt, step=step, base=base, state=state))
                logger.info(
                    "the state after step %d is saved in %s; it held up training for %.2f s",
                    step,
                    attempt.target,
                    held_up,
                )
            else:
                attempt.await_verdict()
                self._committed.append(step)

        self._thread = threading.Thread(
            target=self._try,
            args=(work, attempt, f"step {step}", needed),
            name="checkpoint",
            daemon=True,  # who forgets to close does not wait for a peer that is gone
        )
        held_up = time.perf_counter() - began
        self._thread.start()
        return held_up

    def lost_base(self, name: str) -> bool:
        """Whether frozen weights that were here have gone, or have been changed, since.

        They are looked at, not read. What the first process finds counts: where it says so, all
        call `forget_base`, and `save_base` writes them again.
        """
        return name in self._bases and traces(self.root / name) != self._bases[name]

    def forget_base(self, name: str) -> None:
        """Have the next `save_base` verify these frozen weights, or write them again."""
        self.wait()
        self._bases.pop(name, None)

    def base_traces(self, name: str) -> Traces:
        """For the writer of the next job, or of this one's next save."""
        return self._bases[name]

    def save_base(self, name: str, fragments: Iterable[Fragment]) -> None:
        """Write frozen weights to `ROOT/name`, unless they are there and verify; returns when done.

        A name stands for its content: `base-<hash>`. A failure is one of a save; the next call
        tries again, and saves that name the base fail until it is there.
        """
        if not is_base_name(name):
            raise ValueError(f"{name!r} is not a name of frozen weights: base-<hash>")
        self._count += 1
        self.wait()
        if name in self._bases:
            return
        self.failure = None
        attempt = self._attempt(name)

        def work() -> None:
            if attempt.target.exists() and self._is_whole(attempt):
                return
            attempt.write(views(fragments))
            if self._rank == 0:
                commit(attempt, self._manifest(attempt, step=0, base=None, state={}))
            else:
                attempt.await_verdict()

        self._try(work, attempt, f"the frozen weights {name}", 0)
        if self.failure is None:
            self._bases[name] = traces(self.root / name)

    def go_back(self, step: int) -> None:
        """What was saved after `step` is to be saved anew."""
        self.wait()
        self._committed = [each for each in self._committed if each <= step]

    def wait(self) -> None:
        """Return when nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self, patience_seconds: int | float | None = None) -> None:
        """Wait for what is under way, for so long at most, and give the memory back."""
        if self._thread is not None:
            self._thread.join(patience_seconds)
        self._thread = None
        self._copy = HostCopy()

    def _attempt(self, target: str) -> Attempt:
        return Attempt(
            self.root,
            target,
            name=f"{self._job}.{self._count}",
            rank=self._rank,
            world_size=self._world_size,
            timeout_seconds=self._timeout_seconds,
        )

    def _manifest(
        self, attempt: Attempt, *, step: int, base: str | None, state: Mapping[str, Any]
    ) -> Manifest:
        """The manifest of what all processes wrote; returns when they have."""
        files = attempt.collect()
        # All are here, so none is still looking for the verdict on an earlier attempt.
        while self._left:
            discard(self._left.pop())
        return Manifest(
            step=step,
            attempt=attempt.name,
            created=now(),
            versions=library_versions(),
            files=files,
            base=base,
            state=state,
        )

    def _finish(self, attempt: Attempt, manifest: Manifest) -> None:
        step = manifest.step
        commit(attempt, manifest)
        self._left.append(attempt.directory)  # where it was not needed
        self._committed.append(step)
        name_latest(self.root, step, attempt.name)
        margin = self._margin
        spared = [] if margin is None else needed_to_go_back(self.root, step, margin=margin)
        prune(
            self.root,
            step,
            keep_last=self._keep_last,
            own=self._committed,
            bases=self._bases,
            by=attempt.name,
            spared=spared,
        )

    def _is_whole(self, attempt: Attempt) -> bool:
        """Whether frozen weights are what was saved; if not, the first process removes them."""
        if self._rank > 0:
            return not attempt.await_removal_of_target()
        if verifies(attempt.target):
            attempt.keep_target()
            self._left.append(attempt.directory)
            return True
        remove(attempt.target, attempt.name)
        return False

    def _try(self, work: Callable[[], None], attempt: Attempt, what: str, needed: int) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on
            reason = self._reason(error, needed)
            self.failure = (
                f"saving {what} to {self.root} failed: {reason}; training continues, and the next"
                " save tries again"
            )
            if self._rank == 0:
                attempt.fail(reason)
                attempt.clear()
                self._left.append(attempt.directory)
                logger.error("%s", self.failure)  # noqa: TRY400  # a sentence, no traceback
            elif not isinstance(error, SaveError):
                attempt.fail(reason)
                with suppress(SaveError):
                    attempt.await_verdict()

    def _reason(self, error: Exception, needed: int) -> str:
        if isinstance(error, SaveError | CheckpointError):
            return str(error)
        reason = getattr(error, "strerror", None) or repr(error)
        place = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
        amount = f" ({needed:,} bytes needed)" if needed else ""
        return f"rank {self._rank}: {reason}{place}{amount}"
