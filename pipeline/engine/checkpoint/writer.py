"""Saves checkpoints while training continues.

Every process writes its file into `.writing-*`, then a small JSON file with its size and CRC-32, or
the reason for a failure. The first process waits for these, writes the manifest and renames the
directory. No collectives are used, so a background save can't interleave with the collectives of
training, and a failed save can't hang training.
"""

import json
import logging
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import (
    MANIFEST,
    REMOVING,
    WRITING,
    Fragment,
    Manifest,
    StoredFile,
    file_name,
    list_steps,
    parse_step,
    remove,
    step_name,
)
from pipeline.engine.checkpoint.history import list_rollback_targets, update_latest
from pipeline.files.durable import discard, rename_durably, sync, write_atomically, write_durably
from pipeline.files.tensor_io import DTYPES, view_bytes
from pipeline.system.errors import CheckpointError, ConfigError, require
from pipeline.system.faults import fault_point

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20

POLL_SECONDS = (0.005, 0.25)
"""Pause between two checks for the other processes' files: at first, and after a long wait."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SaveError(Exception):
    """A checkpoint was not written; training continues."""


class CheckpointWriter:
    """Saves one process's files; all processes make the same calls in the same order.

    The caller holds the lock of the directory (`RunLock`): incomplete directories of other jobs are
    deleted. A save that fails on any process is logged by the first process and reported in
    `failure`; earlier checkpoints are untouched, and the next save tries again.

    All processes pass the same `job`, a unique identifier. The last `keep_last` checkpoints, at
    least 2, are kept. The first process waits for the others' files for `timeout_seconds`. `margin`
    is the minimum number of steps undone by a rollback; None keeps no rollback targets.

    Raises:
        ConfigError: `keep_last` is too small, or the directory can't be created or written to.
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
        margin: int | None = None,
    ) -> None:
        require(keep_last >= 2, f"keep_last must be at least 2, got {keep_last}")
        self.root = root
        self.failure: str | None = None
        """The reason why this process's last save failed; None if it didn't."""
        self._job = job
        self._rank = rank
        self._world_size = world_size
        self._keep_last = keep_last
        self._timeout_seconds = timeout_seconds
        self._margin = margin
        self._thread: threading.Thread | None = None
        self._count = 0
        """Number of saves so far, the same on all processes."""
        self._committed: list[int] = []
        self._abandoned: list[Path] = []
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{root} can't be created: {error.strerror}") from error
        require(os.access(root, os.W_OK | os.X_OK), f"{root} can't be written to")
        if rank == 0:
            for path in root.iterdir():
                if path.name.startswith((WRITING, REMOVING)) and f"-{job}." not in path.name:
                    discard(path)

    def save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        document: Mapping[str, Any],
        *,
        base: str | None = None,
    ) -> None:
        """Copy the fragments to host memory and start writing them.

        The file contains the values at the time of the call; a pending save is completed first. The
        first process stores `document`, the run's state. `base` is the name passed to `save_base`.
        """
        self.wait()
        start = time.perf_counter()
        copies = [replace(fragment, tensor=_copy(fragment.tensor)) for fragment in fragments]
        seconds = time.perf_counter() - start
        state = json.loads(json.dumps(document))
        directory = self._new_directory(step_name(step))

        def work() -> None:
            fault_point("checkpoint.before_write")
            self._write(directory, copies)
            if self._rank == 0:
                self._commit(directory, step_name(step), step=step, base=base, state=state)
                self._committed.append(step)
                update_latest(self.root, step)
                self._prune(step)
                message = "saved the state after step %d in %s; training was blocked for %.2f s"
                logger.info(message, step, self.root / step_name(step), seconds)

        self._thread = threading.Thread(
            target=self._run_save,
            args=(work, directory, f"step {step}"),
            name="checkpoint",
            daemon=True,  # don't block exit on a peer that has died
        )
        self._thread.start()

    def save_base(self, name: str, fragments: Iterable[Fragment]) -> None:
        """Write frozen weights to `ROOT/name` and wait for this process's file (rank 0: all files).

        A failure is reported like a failed save; saves that refer to the base then fail too.
        """
        self.wait()
        directory = self._new_directory(name)

        def work() -> None:
            on_host = [replace(part, tensor=part.tensor.detach().cpu()) for part in fragments]
            self._write(directory, on_host)
            if self._rank == 0:
                self._commit(directory, name, step=0, base=None, state={})

        self._run_save(work, directory, f"the frozen weights {name}")

    def roll_back(self, step: int) -> None:
        """Forget the saves after `step`, which will be repeated."""
        self.wait()
        self._committed = [saved for saved in self._committed if saved <= step]

    def wait(self, timeout_seconds: int | float | None = None) -> None:
        """Wait for a pending save, for at most `timeout_seconds`."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _new_directory(self, target: str) -> Path:
        """Prepare the next save; return the path of its hidden directory."""
        self._count += 1
        while self._abandoned:
            discard(self._abandoned.pop())
        self.failure = None
        return self.root / f"{WRITING}{target}-{self._job}.{self._count}"

    def _write(self, directory: Path, fragments: Sequence[Fragment]) -> None:
        """Write this process's file and report it."""
        directory.mkdir(exist_ok=True)
        stored = write_file(directory / file_name(self._rank, self._world_size), fragments)
        write_atomically(_report_path(directory, self._rank), json.dumps(vars(stored)).encode())

    def _collect(self, directory: Path) -> dict[str, StoredFile]:
        """Wait for the reports of all processes; return their files by name."""
        files: dict[str, StoredFile] = {}
        end = time.monotonic() + self._timeout_seconds
        pause, longest = POLL_SECONDS
        existing = _list_files(directory)  # stat() may return a stale negative entry of NFS
        for rank in range(self._world_size):
            report = _report_path(directory, rank)
            while report not in existing:
                if time.monotonic() > end:
                    seconds = self._timeout_seconds
                    raise SaveError(f"rank {rank} did not report within {seconds:g} seconds")
                time.sleep(pause)
                pause = min(1.5 * pause, longest)
                existing = _list_files(directory)
            content = json.loads(report.read_bytes())
            if "failed" in content:
                raise SaveError(content["failed"])
            files[file_name(rank, self._world_size)] = StoredFile(**content)
        return files

    def _commit(
        self, directory: Path, target: str, *, step: int, base: str | None, state: Mapping[str, Any]
    ) -> None:
        """Complete the directory and rename it; the checkpoint exists only after the rename."""
        files = self._collect(directory)
        if base is not None and not (self.root / base / MANIFEST).is_file():
            raise SaveError(f"the frozen weights {base} are missing")
        fault_point("checkpoint.before_manifest")
        manifest = Manifest(step=step, base=base, files=files, state=state)
        write_durably(directory / MANIFEST, manifest.to_bytes())
        for rank in range(self._world_size):
            _report_path(directory, rank).unlink()
        sync(directory)
        fault_point("checkpoint.before_rename")
        if (self.root / target).exists():
            remove(self.root / target)
        rename_durably(directory, self.root / target)
        fault_point("checkpoint.after_rename")

    def _prune(self, step: int) -> None:
        """Delete all but the newest `keep_last` checkpoints and rollback targets, and unused bases.

        Checkpoints of earlier jobs count only if they are valid. Checkpoints after `step`, which
        remain if a run is resumed from an earlier one, are kept: they will be replaced.
        """
        rollback_targets = list_rollback_targets(self.root, step, margin=self._margin)
        num_valid = 0
        for path in list_steps(self.root):
            if path.name > step_name(step):
                continue
            if num_valid < self._keep_last:
                num_valid += parse_step(path) in self._committed or _is_valid(path)
            elif path not in rollback_targets:
                remove(path)
        try:
            used = {Manifest.read(path).base for path in list_steps(self.root)}
        except CheckpointError:
            return  # a damaged manifest could refer to any base
        for path in self.root.glob("base-*"):
            if path.name not in used:
                remove(path)

    def _run_save(self, work: Callable[[], None], directory: Path, saved: str) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # a failed save must not stop training
            reason = _describe_error(error, self._rank)
            self.failure = (
                f"saving {saved} to {self.root} failed: {reason}; training continues, and the next"
                " save will retry"
            )
            if self._rank == 0:
                logger.error("%s", self.failure)  # noqa: TRY400  # the message suffices
                self._abandoned.append(directory)
                discard(directory)
                return
            discard(directory / file_name(self._rank, self._world_size))
            try:
                content = json.dumps({"failed": reason}).encode()
                write_atomically(_report_path(directory, self._rank), content)
            except OSError:
                discard(directory)  # rank 0 notices the missing directory


def write_file(path: Path, fragments: Sequence[Fragment]) -> StoredFile:
    """Write fragments in host memory to a new safetensors file and flush it to disk.

    Raises:
        OSError: the file can't be written.
        ValueError: two fragments have the same label.
    """
    # Widest dtypes first: tensors stay aligned without padding, which the format forbids.
    ordered = sorted(fragments, key=lambda fragment: -fragment.tensor.element_size())
    header: dict[str, Any] = {}
    end = 0
    for fragment in ordered:
        if fragment.label in header:
            raise ValueError(f"{fragment.label} is saved twice")
        start, end = end, end + fragment.tensor.nbytes
        header[fragment.label] = {
            "dtype": _DTYPE_NAMES[fragment.tensor.dtype],
            "shape": [fragment.tensor.numel()],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    crc32 = 0
    with path.open("wb") as file:
        head = len(text).to_bytes(8, "little") + text
        for part in (memoryview(head), *(view_bytes(fragment.tensor) for fragment in ordered)):
            for begin in range(0, part.nbytes, CHUNK_BYTES):
                chunk = part[begin : begin + CHUNK_BYTES]
                crc32 = zlib.crc32(chunk, crc32)
                file.write(chunk)
        fault_point("checkpoint.mid_file")
        file.flush()
        os.fsync(file.fileno())
    fault_point("checkpoint.after_file")
    return StoredFile(nbytes=len(head) + end, crc32=crc32)


def _copy(tensor: Tensor) -> Tensor:
    """Copy to host memory that, unlike malloc's, is returned to the system when it is freed."""
    if not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=tensor.dtype).copy_(tensor.detach())


def _report_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


def _list_files(directory: Path) -> set[Path]:
    try:
        return set(directory.iterdir())
    except FileNotFoundError:
        raise SaveError("another rank abandoned the save") from None


def _is_valid(path: Path) -> bool:
    with suppress(CheckpointError):
        Checkpoint.open(path).verify()
        return True
    return False


def _describe_error(error: Exception, rank: int) -> str:
    """Describe why a save failed, as part of a sentence."""
    if isinstance(error, SaveError | CheckpointError):
        return str(error)
    location = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return f"rank {rank}: {getattr(error, 'strerror', None) or repr(error)}{location}"
