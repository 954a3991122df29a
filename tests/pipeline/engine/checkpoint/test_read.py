"""What was saved is read by any number of processes, bit for bit."""

import itertools
import random
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from pipeline.engine.checkpoint import checkpoint as checkpoint_module
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.format import Columns, Fragment
from pipeline.errors import CheckpointError
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
        saver.close()
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


def test_elements_are_converted_to_the_dtype_they_are_read_into(tmp_path: Path) -> None:
    values = torch.randn(1000)
    save_on_all(tmp_path, [[Fragment("w", 0, values)]])
    checkpoint = Checkpoint.open(tmp_path / "step_00000005")
    half, double, every_other = (
        torch.empty(100, dtype=torch.bfloat16),
        torch.empty(100, dtype=torch.float64),
        torch.zeros(200)[::2],
    )

    for out in (half, double, every_other):
        checkpoint.read("w", 300, out)

    assert torch.equal(half, values[300:400].bfloat16())
    assert torch.equal(double, values[300:400].double())
    assert torch.equal(every_other, values[300:400])


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    tensors = {"é/w": torch.randn(10), "b": any_bits(3, torch.bfloat16, 0), "none": torch.empty(0)}
    save_on_all(tmp_path, [[Fragment(key, 0, tensor) for key, tensor in tensors.items()]])

    file = tmp_path / "step_00000005" / "rank-00000-of-00001.safetensors"
    read = safetensors.torch.load_file(file)

    assert read.keys() == {"é/w|0:10", "b|0:3", "none|0:0"}
    assert same_bits(read["é/w|0:10"], tensors["é/w"])
    assert same_bits(read["b|0:3"], tensors["b"])


def test_frozen_weights_are_read_like_the_others(tmp_path: Path) -> None:
    frozen = torch.randn(10)
    bases = [[Fragment("frozen", 0, frozen[:4])], [Fragment("frozen", 4, frozen[4:])]]
    shards = [[Fragment("w", 0, torch.ones(2))], [Fragment("w", 2, torch.ones(1))]]
    save_on_all(tmp_path, shards, bases=bases)

    checkpoint, out = Checkpoint.open(tmp_path / "step_00000005"), torch.empty(5)
    checkpoint.read("frozen", 2, out)
    assert torch.equal(out, frozen[2:7])
    assert sorted(checkpoint.keys()) == ["frozen", "w"]
    assert checkpoint.base is not None
    assert checkpoint.base.path == tmp_path / "base-1a2b"


def test_columns_of_two_processes_are_read_as_one_tensor(tmp_path: Path) -> None:
    matrix = torch.arange(15.0).view(3, 5)
    columns = [Columns(0, 2, 5), Columns(2, 3, 5)]
    own = [matrix[:, :2].reshape(-1), matrix[:, 2:].reshape(-1)]
    save_on_all(
        tmp_path,
        [[Fragment("w", 0, own[rank], columns[rank])] for rank in (0, 1)],
    )

    checkpoint, out = Checkpoint.open(tmp_path / "step_00000005"), torch.empty(11)
    checkpoint.read("w", 3, out)

    assert checkpoint.numel("w") == 15
    assert torch.equal(out, matrix.view(-1)[3:14])


def test_missing_elements_are_an_error(tmp_path: Path) -> None:
    save_on_all(tmp_path, [[Fragment("w", 0, torch.ones(4)), Fragment("w", 5, torch.ones(5))]])
    checkpoint = Checkpoint.open(tmp_path / "step_00000005")

    for start, count in ((3, 3), (8, 3)):
        with pytest.raises(CheckpointError, match="elements of w"):
            checkpoint.read("w", start, torch.empty(count))


def test_invalid_fragments_are_refused() -> None:
    for key in ("", "a|b", "a\nb"):
        with pytest.raises(ValueError, match="is not a name of a fragment"):
            Fragment(key, 0, torch.zeros(3))
    for tensor in (torch.zeros(2, 2), torch.zeros(6)[::2]):
        with pytest.raises(ValueError, match="must be flat and contiguous"):
            Fragment("w", 0, tensor)


def test_a_process_reads_the_header_of_its_own_file_alone_until_it_needs_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(3000)
    save_on_all(
        tmp_path,
        [
            [
                Fragment("w", 1000 * rank, weight[1000 * rank : 1000 * (rank + 1)]),
                Fragment(f"random/{rank}/torch", 0, torch.full((5,), rank, dtype=torch.uint8)),
            ]
            for rank in range(3)
        ],
    )
    opened: list[str] = []
    read = checkpoint_module.read_header
    monkeypatch.setattr(
        checkpoint_module,
        "read_header",
        lambda file: opened.append(file.name) or read(file),
    )
    checkpoint = Checkpoint.open(tmp_path / "step_00000005", rank=1)

    own = torch.empty(700)
    checkpoint.read("w", 1200, own)
    alone = checkpoint.read_prefix("random/1/")
    assert opened == ["rank-00001-of-00003.safetensors"]
    assert torch.equal(own, weight[1200:1900])
    assert alone["torch"].tolist() == [1] * 5

    across = torch.empty(2000)
    checkpoint.read("w", 500, across)
    assert torch.equal(across, weight[500:2500])
    assert checkpoint.read_prefix("random/2/")["torch"].tolist() == [2] * 5
    assert checkpoint.read_prefix("random/3/") == {}
    assert sorted(opened) == [f"rank-0000{rank}-of-00003.safetensors" for rank in range(3)]
