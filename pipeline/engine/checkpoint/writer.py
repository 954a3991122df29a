"""Saving while training continues."""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.attempt import Attempt, Saved, SaveError, reason_of
from pipeline.engine.checkpoint.base import Traces, traces
from pipeline.engine.checkpoint.commit import commit, name_latest, prune, verifies
from pipeline.engine.checkpoint.healthy import needed_to_go_back
from pipeline.engine.checkpoint.host_copy import HostCopy, HostFragment, total_bytes, views
from pipeline.engine.checkpoint.layout import Fragment, is_base_name, step_name
from pipeline.engine.checkpoint.local import LocalDirectory, LocalPart
from pipeline.engine.checkpoint.manifest import Manifest
from pipeline.engine.checkpoint.removal import clean, remove
from pipeline.engine.checkpoint.uploads import NONE, Upload, Uploads
from pipeline.errors import ConfigError, require
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

    With a `local` directory each process writes to its machine's disk first, and what is there is
    copied to `root` after that. A save waits while two are on their way.

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
        local: LocalDirectory | None = None,
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
        self.uploads = None if local is None else Uploads(local)
        """Of a process that writes to its machine's disk first."""

        self._last = NONE  # step of the last call
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
        self._join()

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
        kept: int = NONE,
    ) -> float:
        """Copy the fragments and begin to write them; the seconds that the caller was held up.

        The file will hold what the tensors hold now. A save still under way is waited for first,
        and a step that this writer has saved is not saved again. `document` is the run's state, as
        JSON; that of the first process is kept. `base` names what `save_base` wrote. `kept` is the
        newest save that is on the disks of all machines, which stays there until the next one.
        """
        began = time.perf_counter()
        held_up = 0.0
        self._count += 1
        if self.uploads is None or self._last == step:
            self.wait()
        self._join()
        self._last = step
        if self._committed[-1:] == [step]:
            return time.perf_counter() - began
        if self.uploads is not None:
            self.uploads.make_room(kept)
        self.failure = None
        saved = Saved(step, base, json.loads(json.dumps(document)))
        attempt = self._attempt(step_name(step))
        copies, problem = self._copied(fragments)

        def work() -> None:
            fault_point("checkpoint.before_write")
            if problem is not None:
                raise problem
            if self.uploads is not None:
                part = self.uploads.write(self._count, attempt, saved, copies)
                self._upload(self.uploads, attempt, saved, part)
                where = self.uploads.directory.root
            else:
                attempt.write(copies)
                self._complete(attempt, saved)
                where = attempt.target
            if self._rank == 0:
                sentence = "the state after step %d is saved in %s; it held up training for %.2f s"
                logger.info(sentence, step, where, held_up)

        self._thread = threading.Thread(
            target=self._try,
            args=(work, attempt, f"step {step}", total_bytes(copies)),
            name="checkpoint",
            daemon=True,  # who forgets to close does not wait for a peer that is gone
        )
        held_up = time.perf_counter() - began
        self._thread.start()
        return held_up

    def _copied(
        self, fragments: Iterable[Fragment]
    ) -> tuple[Sequence[HostFragment], MemoryError | None]:
        """Copies of the fragments, or why there is no memory for them."""
        try:
            return self._copy.take(fragments), None
        except MemoryError as error:
            return [], error

    @property
    def newest_local(self) -> int:
        """The last save that is on this machine's disk; what the first of them has, all have."""
        self._join()
        return NONE if self.uploads is None else self.uploads.newest

    def take_uploads(self) -> list[Upload]:
        """What has been copied to `root` since the last call; the first process knows."""
        return [] if self.uploads is None else self.uploads.take_finished()

    def upload_again(self, kept: int) -> None:
        """Begin to copy what the disks of all machines have once more: the last time failed."""
        self._count += 1
        self.wait()
        if self.uploads is None or kept == NONE:
            return
        part = self.uploads.part(kept)
        saved = Saved(part.identity.step, part.base, part.state or {})
        self._upload(self.uploads, self._attempt(step_name(saved.step)), saved, part)

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
        """The traces of a base for the writer of the next job, or for this one's next save."""
        return self._bases[name]

    def save_base(self, name: str, fragments: Iterable[Fragment]) -> None:
        """Write frozen weights to `ROOT/name`, unless they are there and verify; returns when done.

        A name stands for its content: `base-<hash>`. A failure is one of a save; the next call
        tries again, and saves that name the base fail until it is there.
        """
        if not is_base_name(name):
            raise ValueError(f"{name!r} is not a name of frozen weights: base-<hash>")
        self._count += 1
        if name in self._bases:
            return
        self.wait()
        self.failure = None
        attempt = self._attempt(name)

        def work() -> None:
            if attempt.target.exists() and self._is_whole(attempt):
                return
            attempt.write(views(fragments))
            if self._rank == 0:
                manifest = attempt.manifest(Saved(0, None, {}))
                self._forget_earlier()
                commit(attempt, manifest)
            else:
                attempt.await_verdict()

        self._try(work, attempt, f"the frozen weights {name}", 0)
        if self.failure is None:
            self._bases[name] = traces(self.root / name)

    def go_back(self, step: int) -> None:
        """Forget what was saved after `step`: it will be saved anew."""
        self.wait()
        self._committed = [each for each in self._committed if each <= step]
        if self.uploads is not None:
            self.uploads.forget()

    def wait(self) -> None:
        """Return when nothing is under way."""
        self._join()
        if self.uploads is not None:
            self.uploads.wait()

    def _join(self) -> None:
        """Return when no copy of the state is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self, patience_seconds: int | float | None = None) -> None:
        """Wait for what is under way, for so long at most, and give the memory back."""
        if self._thread is not None:
            self._thread.join(patience_seconds)
        if self.uploads is not None:
            self.uploads.wait(patience_seconds)
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

    def _upload(
        self, uploads: Uploads, attempt: Attempt, saved: Saved, part: LocalPart | None
    ) -> None:
        """Have a thread copy a part, unless it is in `root` already, and make the checkpoint."""

        def work() -> None:
            began = time.perf_counter()
            if part is not None:
                attempt.copy(part)
            num_bytes = self._complete(attempt, saved)
            self.failure = None
            if self._rank == 0:
                seconds = time.perf_counter() - began
                uploads.record(Upload(saved.step, num_bytes, seconds))
                logger.info(
                    "the state after step %d is in %s; copying its %s bytes took %.1f s",
                    saved.step,
                    attempt.target,
                    f"{num_bytes:,}",
                    seconds,
                )

        what = f"step {saved.step}, which stays in {uploads.directory.root},"
        uploads.put(self._count, lambda: self._try(work, attempt, what, 0))

    def _complete(self, attempt: Attempt, saved: Saved) -> int:
        """Make the checkpoint of what all processes wrote, once they have; the bytes of its files.

        Only the first process knows their number.
        """
        if self._rank == 0:
            manifest = attempt.manifest(saved)
            self._finish(attempt, manifest)
            return sum(file.nbytes for file in manifest.files.values())
        attempt.await_verdict()
        self._committed.append(saved.step)
        return 0

    def _forget_earlier(self) -> None:
        """Remove the verdicts on earlier attempts: all processes are past them."""
        while self._left:
            discard(self._left.pop())

    def _finish(self, attempt: Attempt, manifest: Manifest) -> None:
        self._forget_earlier()
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
            bases=list(self._bases),
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
            reason = reason_of(error, self._rank, needed)
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
