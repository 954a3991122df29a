"""Reading checkpoints that any number of processes saved."""

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
from tests.pipeline.engine.checkpoint.saving import make_writer

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random bits, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    size = (numel * dtype.itemsize,)
    return torch.randint(0, limit, size, dtype=torch.uint8, generator=generator).view(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def save_on_all(
    root: Path, shards: list[list[Fragment]], *, bases: list[list[Fragment]] | None = None
) -> None:
    """Save step 5 from as many writers as there are shards."""

    def save_rank(index: int) -> None:
        writer = make_writer(root, rank=index, world_size=len(shards))
        if bases is not None:
            writer.save_base("base-1a2b", bases[index])
        writer.save(5, shards[index], {"rank": index}, base="base-1a2b" if bases else None)
        writer.wait()
        failures.append(writer.failure)

    failures: list[str | None] = []
    threads = [threading.Thread(target=save_rank, args=(index,)) for index in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [None] * len(shards)


def split_randomly(key: str, tensor: Tensor, count: int, rng: random.Random) -> list[Fragment]:
    """Split a tensor into fragments of random lengths; the first or last may be empty."""
    ends = {rng.randint(0, tensor.numel()) for _ in range(count - 1)}
    bounds = [0, *sorted(ends), tensor.numel()]
    return [Fragment(key, start, tensor[start:stop]) for start, stop in itertools.pairwise(bounds)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_interval_of_any_tensor_is_read_as_saved(world_size: int, tmp_path: Path) -> None:
    rng = random.Random(world_size)
    tensors = {
        f"actor/{index}": random_bits(rng.choice([1, 7, 1000]), dtype, index)
        for index, dtype in enumerate(DTYPES)
    }
    shards: list[list[Fragment]] = [[] for _ in range(world_size)]
    for key, tensor in tensors.items():
        for fragment in split_randomly(key, tensor, 4, rng):
            shards[rng.randrange(world_size)].append(fragment)

    save_on_all(tmp_path, shards)

    checkpoint = Checkpoint.open(tmp_path / "step_00000005")
    assert (checkpoint.step, checkpoint.world_size) == (5, world_size)
    assert checkpoint.state == {"rank": 0}
    assert sorted(checkpoint.keys()) == sorted(tensors)
    for key, tensor in tensors.items():
        assert checkpoint.numel(key) == tensor.numel()
        assert checkpoint.dtype(key) == tensor.dtype
        for _ in range(5):
            start, stop = sorted(rng.randint(0, tensor.numel()) for _ in range(2))
            out = torch.zeros(stop - start, dtype=tensor.dtype)
            checkpoint.read(key, start, out)
            assert same_bits(out, tensor[start:stop])
    checkpoint.verify()


def test_files_are_valid_safetensors(tmp_path: Path) -> None:
    b = random_bits(3, torch.bfloat16, 0)
    tensors = {"é/w": torch.randn(10), "b": b, "none": torch.empty(0)}
    save_on_all(tmp_path, [[Fragment(key, 0, tensor) for key, tensor in tensors.items()]])

    file = tmp_path / "step_00000005" / "rank-00000-of-00001.safetensors"
    tensors_in_file = safetensors.torch.load_file(file)

    assert tensors_in_file.keys() == {"é/w|0:10", "b|0:3", "none|0:0"}
    assert same_bits(tensors_in_file["é/w|0:10"], tensors["é/w"])
    assert same_bits(tensors_in_file["b|0:3"], tensors["b"])


def test_column_shards_of_two_ranks_are_read_as_one_tensor(tmp_path: Path) -> None:
    matrix = torch.arange(15.0).view(3, 5)
    columns = [Columns(0, 2, 5), Columns(2, 3, 5)]
    shards = [matrix[:, :2].reshape(-1), matrix[:, 2:].reshape(-1)]
    save_on_all(tmp_path, [[Fragment("w", 0, shards[rank], columns[rank])] for rank in (0, 1)])

    checkpoint, out = Checkpoint.open(tmp_path / "step_00000005"), torch.empty(11)
    checkpoint.read("w", 3, out)

    assert checkpoint.numel("w") == 15
    assert torch.equal(out, matrix.view(-1)[3:14])


def test_base_and_per_rank_tensors_are_read_by_name(tmp_path: Path) -> None:
    full = torch.arange(12.0)
    slices = slice(0, 7), slice(7, 12)
    shards = [[Fragment(f"run/{rank}", 0, full[part])] for rank, part in enumerate(slices)]
    bases = [[Fragment("base", part.start, full[part])] for part in slices]
    save_on_all(tmp_path, shards, bases=bases)

    for rank in range(3):  # the last one wrote no file
        checkpoint = Checkpoint.open(tmp_path / "step_00000005", rank=rank)
        assert checkpoint.keys() == ["run/0", "run/1", "base"]
        assert checkpoint.nbytes == sum(file.stat().st_size for file in tmp_path.glob("*/rank*"))
        tensors = checkpoint.read_prefix("run/")
        assert list(tensors) == ["0", "1"] if rank == 2 else [str(rank)]
        assert all(torch.equal(x, full[slices[int(name)]]) for name, x in tensors.items())
        out = torch.empty(6, dtype=torch.float64)
        checkpoint.read("base", 4, out)
        assert out.tolist() == full[4:10].tolist()
        assert (checkpoint.numel("base"), checkpoint.read_prefix("none")) == (12, {})


def test_missing_data_raises_with_its_name(tmp_path: Path) -> None:
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
    ("content", "message"),
    [
        ({"format": 4}, "is not a manifest of format 3"),
        ({"format": 3, "files": {"../x": {"nbytes": 1, "crc32": 1}}}, "refers to files outside"),
        ({"format": 3, "files": {}, "base": "/base-1"}, "refers to files outside"),
        ({"format": 3, "files": {"x": {}}}, "is not a valid manifest"),
    ],
)
def test_invalid_manifest_raises(content: dict[str, object], message: str, tmp_path: Path) -> None:
    content = {"step": 1, "base": None, "state": {}, **content}
    crc32 = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    text = json.dumps({"crc32": crc32, "manifest": content})
    (tmp_path / "manifest.json").write_text(text)

    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
