"""Weights as safetensors, written while they come in."""

import json
import re
import tempfile
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from pipeline.faults import fault_point
from pipeline.files.durable import replace_durably, settle, sync_directory, sync_file
from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.parallel.group import ALONE, Group
from pipeline.parallel.launched import local_world_size
from pipeline.system.memory import available_bytes

SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

MAX_SHARD_BYTES = 5_000_000_000
"""Of a file, unless one tensor is larger."""

NamedTensors = Iterable[tuple[str, Tensor]]


def can_stream(model: PreTrainedModel) -> bool:
    """Whether one parameter is enough to tell what the family's files hold for it.

    Some hold in one tensor what the model has in several.
    """
    return not any(
        isinstance(step, WeightConverter) and len(step.target_patterns) > 1
        for step in get_model_conversion_mapping(model, add_legacy=False)
    )


def as_saved(model: PreTrainedModel, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Parameters under the names, and cut into the pieces, that `save_pretrained` writes.

    Some families have other names in files than in the model, or hold in one parameter what their
    files have by expert.

    Raises:
        ValueError: the family can't be written this way.
    """
    if not can_stream(model):
        raise ValueError(f"{model.config.model_type} models are saved by save_pretrained only")
    for name, tensor in named:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def stream_export(
    named: NamedTensors,
    directory: Path,
    *,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    tied: Container[str] = (),
    group: Group = ALONE,
) -> None:
    """Write full tensors as `model.safetensors`, or as shards and their index.

    In memory are one shard's tensors at most, as copies on the CPU, and the one that `named`
    yields, which may be freed or filled again at the next turn. Names in `tied`, such as a model's
    `all_tied_weights_keys`, are left out: they come back when plain `from_pretrained` ties them.
    The directory's weights are replaced at the end, when the new ones are on the disk; a process
    that is killed meanwhile, or a loss of power, leaves the old ones, the new ones or none, but no
    mixture.

    All processes of `group` call it with the same tensors. They write shards in turn, those that
    have main memory for one beside what others of their machine take; each goes on while its
    shard is written. Where shards end hangs on the tensors alone, so that the files are the same
    whoever writes.

    Raises:
        ValueError: a name came twice.
        OSError: a process can't write; the others raise it too.
    """
    max_shard_bytes = max_shard_bytes or MAX_SHARD_BYTES
    with _scratch(directory, group) as scratch:
        shards = _Shards(scratch, {**(metadata or {}), "format": "pt"}, max_shard_bytes, group)
        try:
            size = 0
            for name, tensor in named:
                if name in tied:
                    continue
                if size and size + tensor.nbytes > max_shard_bytes:
                    shards.write()
                    size = 0
                shards.add(name, tensor)
                size += tensor.nbytes
                del tensor  # the caller's is not ours to keep while it makes the next
            shards.write()
        finally:
            shards.wait()
        shards.check()
        if group.rank == 0:
            fault_point("export.before_replace")
            _replace(shards, directory)


@contextmanager
def _scratch(directory: Path, group: Group) -> Iterator[Path]:
    """A directory beside the model that all processes write to; the first one's to remove."""
    if group.rank > 0:
        yield directory / group.gather_objects("")[0]
        return
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as scratch:
        group.gather_objects(Path(scratch).name)
        yield Path(scratch)


class _Shards:
    """Files of tensors, numbered in the order they are written, of which some are this process's.

    One is written by a thread while the tensors of other processes' pass by.
    """

    def __init__(
        self, scratch: Path, metadata: dict[str, str], max_bytes: int, group: Group
    ) -> None:
        self.scratch = scratch
        self.metadata = metadata
        self.count = 0
        self.shard_of: dict[str, int] = {}
        self.total_size = self.total_parameters = 0
        self._group = group
        has_room = group.rank == 0 or available_bytes() // local_world_size() >= 2 * max_bytes
        able = group.gather_objects(has_room)
        self._writers = [rank for rank, is_able in enumerate(able) if is_able]
        self._tensors: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    @property
    def files(self) -> list[Path]:
        """All shards, in their order."""
        return [self.scratch / f"{number}.safetensors" for number in range(self.count)]

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self.shard_of:
            raise ValueError(f"{name} came twice")
        self.shard_of[name] = self.count
        self.total_size += tensor.nbytes
        self.total_parameters += tensor.numel()
        if self._writers[self.count % len(self._writers)] != self._group.rank:
            return
        self.wait()  # for the shard before: only one is in memory
        self._tensors[name] = tensor.detach().to(
            "cpu", copy=True, memory_format=torch.contiguous_format
        )

    def write(self) -> None:
        """Begin to write what was added since the last call, where that is this process's."""
        file, tensors = self.scratch / f"{self.count}.safetensors", self._tensors
        is_mine = self._writers[self.count % len(self._writers)] == self._group.rank
        self.count += 1
        self._tensors = {}
        if not is_mine or self._problem is not None:
            return

        def save() -> None:
            try:
                fault_point("export.before_shard")
                save_file(tensors, file, metadata=self.metadata)
                sync_file(file)  # another machine can't do that for this one
            except Exception as error:  # noqa: BLE001  # a thread has nobody to tell
                self._problem = error
            tensors.clear()

        self._thread = threading.Thread(target=save, name="export", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Return on all processes when each has written its shards.

        Raises:
            OSError: one could not.
        """
        own = None if self._problem is None else str(self._problem)
        problems = self._group.gather_objects(own)
        if self._problem is not None:
            raise self._problem
        for rank, problem in zip(self._group.ranks, problems, strict=True):
            if problem is not None:
                raise OSError(f"rank {rank} can't write to {self.scratch.parent}: {problem}")

    def index(self, names: list[str]) -> str:
        """The index of the shards under their final names."""
        totals = {"total_parameters": self.total_parameters, "total_size": self.total_size}
        weight_map = {name: names[shard] for name, shard in sorted(self.shard_of.items())}
        return json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2) + "\n"


def _replace(shards: _Shards, directory: Path) -> None:
    """Move the files in place; what they replace disappears.

    A single file goes before an index where both are there, so it is taken away last. An index goes
    before its shards change.
    """
    single, index = directory / SINGLE, directory / INDEX
    stale = {path for path in directory.iterdir() if SHARD.fullmatch(path.name)}
    count = len(shards.files)
    settle(shards.scratch)
    if count == 1:
        shards.files[0].replace(single)
        sync_directory(directory)
        index.unlink(missing_ok=True)
    else:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        index.unlink(missing_ok=True)
        sync_directory(directory)
        for file, name in zip(shards.files, names, strict=True):
            file.replace(directory / name)
            stale.discard(directory / name)
        sync_directory(directory)
        replace_durably(index, shards.index(names).encode(), temporary=shards.scratch / INDEX)
        single.unlink(missing_ok=True)
    for path in stale:
        path.unlink()
    sync_directory(directory)
