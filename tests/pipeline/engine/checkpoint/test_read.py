"""Any number of processes reads a checkpoint, bit for bit."""

import itertools
import json
import os
import random
import threading
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import Columns, Fragment
from pipeline.system.errors import CheckpointError
from tests.pipeline.engine.checkpoint.saving import writer

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def any_bits(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    size = (numel * dtype.itemsize,)
    return torch.randint(0, limit, size, dtype=torch.uint8, generator=generator).view(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def save_on_all(
    root: Path, shards: list[list[Fragment]], *, bases: list[list[Fragment]] | None = None
) -> None:
    """Save step 5 from as many writers as there are shards."""

    def rank(index: int) -> None:
        saver = writer(root, rank=index, world_size=len(shards))
        if bases is not None:
            saver.save_base("base-1a2b", bases[index])
        saver.save(5, shards[index], {"rank": index}, base="base-1a2b" if bases else None)
        saver.wait()
        failures.append(saver.failure)

    failures: list[str | None] = []
    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [None] * len(shards)


def cut(key: str, tensor: Tensor, parts: int, choose: random.Random) -> list[Fragment]:
    """A tensor in pieces of random length, the first or last of them empty at times."""
    ends = {choose.randint(0, tensor.numel()) for _ in range(parts - 1)}
    cuts = [0, *sorted(ends), tensor.numel()]
    return [Fragment(key, start, tensor[start:stop]) for start, stop in itertools.pairwise(cuts)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_interval_of_any_tensor_is_what_any_processes_saved(
    world_size: int, tmp_path: Path
) -> None:
    choose = random.Random(world_size)
    tensors = {
        f"actor/{index}": any_bits(choose.choice([1, 7, 1000]), dtype, index)
        for index, dtype in enumerate(DTYPES)
    }
    shards: list[list[Fragment]] = [[] for _ in range(world_size)]
    for key, tensor in tensors.items():
        for piece in cut(key, tensor, 4, choose):
            shards[choose.randrange(world_size)].append(piece)

    save_on_all(tmp_path, shards)

    checkpoint = Checkpoint.open(tmp_path / "step_00000005")
    assert (checkpoint.step, checkpoint.world_size) == (5, world_size)
    assert checkpoint.state == {"rank": 0}
    assert sorted(checkpoint.keys()) == sorted(tensors)
    for key, tensor in tensors.items():
        assert checkpoint.numel(key) == tensor.numel()
        assert checkpoint.dtype(key) == tensor.dtype
        for _ in range(5):
            start, stop = sorted(choose.randint(0, tensor.numel()) for _ in range(2))
            out = torch.zeros(stop - start, dtype=tensor.dtype)
            checkpoint.read(key, start, out)
            assert same_bits(out, tensor[start:stop])
    checkpoint.verify()


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    tensors = {"é/w": torch.randn(10), "b": any_bits(3, torch.bfloat16, 0), "none": torch.empty(0)}
    save_on_all(tmp_path, [[Fragment(key, 0, tensor) for key, tensor in tensors.items()]])

    file = tmp_path / "step_00000005" / "rank-00000-of-00001.safetensors"
    read = safetensors.torch.load_file(file)

    assert read.keys() == {"é/w|0:10", "b|0:3", "none|0:0"}
    assert same_bits(read["é/w|0:10"], tensors["é/w"])
    assert same_bits(read["b|0:3"], tensors["b"])


def test_columns_of_two_processes_are_read_as_one_tensor(tmp_path: Path) -> None:
    matrix = torch.arange(15.0).view(3, 5)
    columns = [Columns(0, 2, 5), Columns(2, 3, 5)]
    own = [matrix[:, :2].reshape(-1), matrix[:, 2:].reshape(-1)]
    save_on_all(tmp_path, [[Fragment("w", 0, own[rank], columns[rank])] for rank in (0, 1)])

    checkpoint, out = Checkpoint.open(tmp_path / "step_00000005"), torch.empty(11)
    checkpoint.read("w", 3, out)

    assert checkpoint.numel("w") == 15
    assert torch.equal(out, matrix.view(-1)[3:14])


def test_tensors_of_the_base_and_of_one_process_are_read_by_their_names(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    cuts = slice(0, 7), slice(7, 12)
    own = [[Fragment(f"run/{rank}", 0, whole[cut])] for rank, cut in enumerate(cuts)]
    bases = [[Fragment("base", cut.start, whole[cut])] for cut in cuts]
    save_on_all(tmp_path, own, bases=bases)

    for rank in range(3):  # the last one wrote no file
        checkpoint = Checkpoint.open(tmp_path / "step_00000005", rank=rank)
        assert checkpoint.keys() == ["run/0", "run/1", "base"]
        assert checkpoint.nbytes == sum(file.stat().st_size for file in tmp_path.glob("*/rank*"))
        found = checkpoint.read_prefix("run/")
        assert list(found) == ["0", "1"] if rank == 2 else [str(rank)]
        assert all(torch.equal(each, whole[cuts[int(name)]]) for name, each in found.items())
        out = torch.empty(6, dtype=torch.float64)
        checkpoint.read("base", 4, out)
        assert out.tolist() == whole[4:10].tolist()
        assert (checkpoint.numel("base"), checkpoint.read_prefix("none")) == (12, {})


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    save_on_all(tmp_path, [[Fragment("w", 2, torch.zeros(3))]])
    file = tmp_path / "step_00000005" / "rank-00000-of-00001.safetensors"
    checkpoint = Checkpoint.open(file.parent)

    with pytest.raises(CheckpointError, match=r"has no v$"):
        checkpoint.read("v", 0, torch.empty(1))
    with pytest.raises(CheckpointError, match="has only 2 of 4 elements of w starting at 0"):
        checkpoint.read("w", 0, torch.empty(4))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="can't be read: the file ends at byte"):
        checkpoint.read("w", 2, torch.empty(3))
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} can't be read: No such file or directory"):
        checkpoint.read("w", 2, torch.empty(3))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"format": 4}, "is not a manifest of format 3"),
        ({"format": 3, "files": {"../x": {"nbytes": 1, "crc32": 1}}}, "refers to files outside"),
        ({"format": 3, "files": {}, "base": "/base-1"}, "refers to files outside"),
        ({"format": 3, "files": {"x": {}}}, "is not a valid manifest"),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(
    content: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    content = {"step": 1, "base": None, "state": {}, **content}
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    text = json.dumps({"crc32": crc32, "manifest": content})
    (tmp_path / "manifest.json").write_text(text)

    with pytest.raises(CheckpointError, match=sentence):
        Checkpoint.open(tmp_path)
