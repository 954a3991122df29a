"""What a job that saves to its machines' disks finds there: the work of the job before.

A checkpoint that all processes of that job have left on their machines is whole, whichever process
is on a machine now. If it is newer than what is in the run's directory, it is copied there first;
so a job with other processes, or of another layout, can go on from it too. Where a machine is
missing, the directory has the newest that there is.
"""

import logging
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.attempt import Attempt, Saved, SaveError
from pipeline.engine.checkpoint.commit import commit, name_latest
from pipeline.engine.checkpoint.find import candidates
from pipeline.engine.checkpoint.layout import file_name, step_name, step_of
from pipeline.engine.checkpoint.local import Identity, LocalDirectory, LocalPart, on_one_disk
from pipeline.engine.checkpoint.removal import clean
from pipeline.engine.checkpoint.run_id import run_id, write_run_id
from pipeline.errors import CheckpointError, ConfigError, UserError
from pipeline.files.durable import discard
from pipeline.files.own_disk import own_disk
from pipeline.parallel.group import Group

logger = logging.getLogger(__name__)

SETTING = "local_checkpoints"

SHOWN_SECONDS = 60
"""In which a network's file system shows a file that another machine has written."""


class LocalStart:
    """The disks of a job's machines as it begins; all processes make one together.

    Args:
        setting: the directory for all runs, as the user names it.
        root: of the run's checkpoints, which all processes see.
        world: the processes.
        job: a text that no other job has, the same on all processes.
        goes_on: whether the run is resumed; else what it had left on the disks is removed.

    Raises:
        ConfigError: a machine has no such directory, and can't make it.
    """

    def __init__(self, setting: str, root: Path, world: Group, *, job: str, goes_on: bool) -> None:
        self._root, self._world, self._job = root, world, job
        earlier = world.gather_objects(run_id(root) if world.rank == 0 else None)[0]
        self._id = earlier if goes_on and earlier is not None else job
        self._is_noted = self._id == earlier and goes_on
        directory: LocalDirectory | None = None
        problem = None
        try:
            place = own_disk(setting, setting=SETTING)
            if earlier is not None and earlier != self._id:
                shutil.rmtree(place / _name(root, earlier), ignore_errors=True)
            own = place / _name(root, self._id)
            directory = LocalDirectory(own, rank=world.rank, world_size=world.size)
        except OSError as error:
            problem = f"{SETTING} {setting} can't be written to: {error.strerror or error}"
        except UserError as error:
            problem = str(error)
        where = "" if world.size == 1 else f" on {socket.gethostname()} (rank {world.rank})"
        problems = world.gather_objects(problem and problem + where)
        if any(problems):
            raise ConfigError(next(each for each in problems if each))
        assert directory is not None
        self.directory = directory
        self._look_around()

    def note(self) -> None:
        """Have the next job know where to look; the first process's, before it saves there."""
        if self._is_noted or self._world.rank > 0:
            return
        try:
            write_run_id(self._root, self._id)
            self._is_noted = True
        except OSError as error:
            logger.warning(
                "%s can't be written to (%s): until it can, no later run finds what is saved in %s",
                self._root,
                error.strerror,
                self.directory.root,
            )

    def upload_newest(self, is_of_now: Callable[[Mapping[str, Any]], bool]) -> None:
        """Copy the newest whole checkpoint to the run's directory, unless that has a newer one.

        `is_of_now` is asked of its state: a run that went back has left others.

        Raises:
            CheckpointError: it can't be copied.
        """
        newest = next(iter(candidates(self._root)), None) if self._world.rank == 0 else None
        there = self._world.gather_objects(-1 if newest is None else step_of(newest) or 0)[0]
        for step, attempt in self._whole():
            if step <= there or self._upload(attempt, is_of_now):
                return

    @property
    def near(self) -> Mapping[str, Mapping[str, Path]]:
        """Files of checkpoints on this machine, by the attempt that wrote them and by name."""
        found: dict[str, dict[str, Path]] = {}
        for part in self._found:
            found.setdefault(part.identity.attempt, {})[part.identity.file] = part.file
        return found

    def settle(self, attempt: str | None) -> LocalPart | None:
        """Remove all but this process's part of the checkpoint that the run goes on from.

        All processes call it, when they have read that checkpoint: one may read another's part.
        """
        self._world.barrier()
        rank, size = self._world.rank, self._world.size
        own = [
            part
            for part in self._found
            if (part.identity.attempt, part.identity.rank, part.identity.world_size)
            == (attempt, rank, size)
        ]
        of_job = {_directory(each, size) for each in range(size)}
        of_machine = {_directory(each, size) for each in self._here}
        alive = of_job if self._is_shared else of_machine
        strangers = self.directory.neighbours() - alive if rank == min(self._here) else set()
        self.directory.keep(own, strangers=sorted(strangers))
        self._found = []
        return next(iter(own), None)

    def _look_around(self) -> None:
        """Find out who is on this machine, and what of the job before."""
        world, root = self._world, self.directory.root
        status = root.stat()
        host = socket.gethostname()
        disks = world.gather_objects((host, status.st_dev, status.st_ino))
        self._here = [each for each, disk in enumerate(disks) if disk == disks[world.rank]]
        others = [
            _directory(each, world.size) for each, disk in enumerate(disks) if disk[0] != host
        ]
        self._is_shared = world.sum(any((root / each).is_dir() for each in others)) > 0
        if self._is_shared:
            logger.warning(
                "%s is one directory for several machines: checkpoints are written to it, and then"
                " copied from it; %s is meant for a disk that each machine has for itself",
                root.parent,
                SETTING,
            )
        elif on_one_disk(root, _nearest(self._root)):
            logger.warning(
                "%s and %s are on one disk: checkpoints are written to it twice",
                root.parent,
                self._root,
            )
        looks = world.rank == 0 or not self._is_shared
        self._found: list[LocalPart] = self.directory.found() if looks else []
        self._owners: dict[Identity, int] = {}
        for process, identities in enumerate(
            world.gather_objects([part.identity for part in self._found])
        ):
            for identity in identities:
                if identity not in self._owners or process == identity.rank:
                    self._owners[identity] = process

    def _whole(self) -> list[tuple[int, str]]:
        """(step, attempt) of the checkpoints of which all parts are there, newest first."""
        ranks: dict[tuple[int, str, int], set[int]] = {}
        for identity in self._owners:
            key = (identity.step, identity.attempt, identity.world_size)
            ranks.setdefault(key, set()).add(identity.rank)
        whole = [key[:2] for key, found in ranks.items() if len(found) == key[2]]
        return sorted(whole, reverse=True)

    def _upload(self, attempt: str, is_of_now: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Copy one checkpoint; False where it is of no use."""
        world = self._world
        mine = [
            part
            for part in self._found
            if part.identity.attempt == attempt and self._owners[part.identity] == world.rank
        ]
        first = next((part for part in mine if part.identity.rank == 0), None)
        if any(world.gather_objects(first is not None and not is_of_now(first.state or {}))):
            return False
        logger.info("copying checkpoint %s from the machines' disks to %s", attempt, self._root)
        if world.rank == 0:
            clean(self._root, but_job=self._job)
        world.barrier()
        problem, damage = None, None
        try:
            for part in mine:
                self._attempt(part).copy(part)
        except CheckpointError as error:
            damage = str(error)
        except OSError as error:
            problem = error.strerror or str(error)
        problems, damages = zip(*world.gather_objects((problem, damage)), strict=True)
        if any(damages):
            sentence = next(each for each in damages if each)
            logger.warning("%s; trying the one before", sentence)
            for part in mine:
                discard(self._attempt(part).directory)
            return False
        if not any(problems) and first is not None:
            problem = self._commit(first)
        problem = next((each for each in (*problems, *world.gather_objects(problem)) if each), None)
        if problem is not None:
            raise CheckpointError(
                f"the newest state is in {self.directory.root} and can't be copied to"
                f" {self._root}: {problem}; make that possible and resume again, or remove"
                f" {self.directory.root} on all machines to go on from an earlier one"
            )
        return True

    def _attempt(self, part: LocalPart) -> Attempt:
        identity = part.identity
        return Attempt(
            self._root,
            step_name(identity.step),
            name=f"{self._job}.0",
            rank=identity.rank,
            world_size=identity.world_size,
            timeout_seconds=SHOWN_SECONDS,
        )

    def _commit(self, first: LocalPart) -> str | None:
        """Make the checkpoint of what is copied; why it can't be."""
        attempt = self._attempt(first)
        try:
            identity = first.identity
            saved = Saved(identity.step, first.base, first.state or {})
            manifest = attempt.manifest(saved, by=identity.attempt)
            commit(attempt, manifest)
            name_latest(self._root, manifest.step, attempt.name)
        except (OSError, SaveError, CheckpointError) as error:
            return getattr(error, "strerror", None) or str(error)
        finally:
            discard(attempt.directory)
        return None


def _name(root: Path, run: str) -> str:
    """The directory of a run within that for all: of its step, and no other run's."""
    return f"{root.resolve().parent.name}-{run}"


def _directory(rank: int, world_size: int) -> str:
    return file_name(rank, world_size).removesuffix(".safetensors")


def _nearest(path: Path) -> Path:
    """The directory, or the one that it will be made in."""
    return next(each for each in (path, *path.parents) if each.exists())
