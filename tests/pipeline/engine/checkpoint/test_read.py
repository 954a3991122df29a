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
from pipeline.engine.checkpoint.layout import Fragment
from pipeline.engine.checkpoint.writer import CheckpointWriter
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


def test_a_fragment_larger_than_a_block_of_memory_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.checkpoint.host_copy.BLOCK_BYTES", 4096)
    monkeypatch.setattr("pipeline.engine.checkpoint.data_file.CHUNK_BYTES", 1000)
    monkeypatch.setattr("pipeline.engine.checkpoint.verify.CHUNK_BYTES", 1000)
    monkeypatch.setattr("pipeline.engine.checkpoint.checkpoint.CHUNK_BYTES", 1000)
    small, large = torch.randn(3), torch.randn(5000)
    save_on_all(tmp_path, [[Fragment("small", 0, small), Fragment("large", 0, large)]])

    checkpoint = Checkpoint.open(tmp_path / "step_00000005")

    checkpoint.verify()
    read, converted = torch.empty(5000), torch.empty(5000, dtype=torch.float64)
    checkpoint.read("large", 0, read)
    checkpoint.read("large", 0, converted)
    assert torch.equal(read, large)
    assert torch.equal(converted, large.double())


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    tensors = {"é/w": torch.randn(10), "b": any_bits(3, torch.bfloat16, 0), "none": torch.empty(0)}
    save_on_all(tmp_path, [[Fragment(key, 0, tensor) for key, tensor in tensors.items()]])

    file = tmp_path / "step_00000005" / "rank-00000-of-00001.safetensors"
    read = safetensors.torch.load_file(file)

    assert read.keys() == {"é/w|0:10", "b|0:3", "none|0:0"}
    assert same_bits(read["é/w|0:10"], tensors["é/w"])
    assert same_bits(read["b|0:3"], tensors["b"])


def test_frozen_weights_are_written_once_and_read_like_the_others(tmp_path: Path) -> None:
    frozen = torch.randn(10)
    bases = [[Fragment("frozen", 0, frozen[:4])], [Fragment("frozen", 4, frozen[4:])]]
    shards = [[Fragment("w", 0, torch.ones(2))], [Fragment("w", 2, torch.ones(1))]]
    save_on_all(tmp_path, shards, bases=bases)
    manifest = tmp_path / "base-1a2b" / "manifest.json"
    written = manifest.stat().st_ino

    save_on_all(tmp_path, shards, bases=bases)

    assert manifest.stat().st_ino == written
    checkpoint, out = Checkpoint.open(tmp_path / "step_00000005"), torch.empty(5)
    checkpoint.read("frozen", 2, out)
    assert torch.equal(out, frozen[2:7])
    assert sorted(checkpoint.keys()) == ["frozen", "w"]
    assert checkpoint.base is not None
    assert checkpoint.base.path == tmp_path / "base-1a2b"


def test_damaged_frozen_weights_are_written_again(tmp_path: Path) -> None:
    bases = [[Fragment("frozen", 0, torch.ones(4))], [Fragment("frozen", 4, torch.ones(6))]]
    shards = [[Fragment("w", 0, torch.ones(2))], []]
    save_on_all(tmp_path, shards, bases=bases)
    file = tmp_path / "base-1a2b" / "rank-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")

    save_on_all(tmp_path, shards, bases=bases)

    Checkpoint.open(tmp_path / "step_00000005").verify()


def test_frozen_weights_that_nothing_names_any_more_are_removed(tmp_path: Path) -> None:
    saver = writer(tmp_path, job="first")
    saver.save_base("base-old", [Fragment("f", 0, torch.ones(1))])
    saver.save(1, [], {}, base="base-old")
    saver.close()

    saver = writer(tmp_path, job="second")
    saver.save_base("base-new", [Fragment("f", 0, torch.ones(1))])
    found = []
    for step in (2, 3):
        saver.save(step, [], {}, base="base-new")
        saver.wait()
        found.append(sorted(path.name for path in tmp_path.glob("base-*")))

    assert found == [["base-new", "base-old"], ["base-new"]]


def test_shares_of_verifying_cover_every_fragment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = range(0, 9000, 1000)
    save_on_all(
        tmp_path, [[Fragment(f"{rank}/{i}", 0, torch.ones(i)) for i in sizes] for rank in (0, 1)]
    )
    checkpoint = Checkpoint.open(tmp_path / "step_00000005")
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "pipeline.engine.checkpoint.checkpoint.verify_fragments",
        lambda fragments: seen.append([fragment.label for fragment in fragments]),
    )

    for share in range(3):
        checkpoint.verify(share=share, shares=3)

    assert all(seen)
    assert sorted(label for labels in seen for label in labels) == sorted(
        f"{rank}/{i}|0:{i}" for rank in (0, 1) for i in sizes
    )


@pytest.mark.parametrize(
    ("shards", "sentence"),
    [
        ([(0, 4), (5, 9)], "elements 4 to 5 are missing"),
        ([(0, 4), (3, 9)], "elements 3 to 4 are there twice"),
        ([(2, 9)], "elements 0 to 2 are missing"),
        ([(0, 4), (7, 7), (4, 6)], "elements 6 to 7 are missing"),
    ],
)
def test_a_tensor_with_a_gap_or_an_overlap_is_never_committed(
    shards: list[tuple[int, int]], sentence: str, tmp_path: Path
) -> None:
    saver = writer(tmp_path)

    pieces = [Fragment("w", start, torch.zeros(stop - start)) for start, stop in shards]
    saver.save(1, pieces, {})
    saver.close()

    assert saver.failure is not None
    assert sentence in saver.failure
    assert not list(tmp_path.iterdir())


def test_what_is_no_fragment_is_refused_at_once() -> None:
    for key in ("", "a|b", "a\nb"):
        with pytest.raises(ValueError, match="is not a name of a fragment"):
            Fragment(key, 0, torch.zeros(3))
    for tensor in (torch.zeros(2, 2), torch.zeros(6)[::2]):
        with pytest.raises(ValueError, match="must be flat and contiguous"):
            Fragment("w", 0, tensor)


def test_only_elements_that_are_there_can_be_read(tmp_path: Path) -> None:
    save_on_all(tmp_path, [[Fragment("w", 0, torch.ones(10))]])
    checkpoint = Checkpoint.open(tmp_path / "step_00000005")

    with pytest.raises(ValueError, match="w with 10 elements can't fill"):
        checkpoint.read("w", 8, torch.empty(3))


def test_a_writer_says_what_it_can_not_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last must be 2 or more, not 1"):
        CheckpointWriter(tmp_path, job="a", rank=0, world_size=1, keep_last=1)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file can't be made: File exists"):
        writer(tmp_path / "file")


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
        lambda file, **sizes: opened.append(file.name) or read(file, **sizes),
    )
    checkpoint = Checkpoint.open(tmp_path / "step_00000005", rank=1)

    own = torch.empty(700)
    checkpoint.read("w", 1200, own)
    alone = checkpoint.written_alone("random/1/")
    assert opened == ["rank-00001-of-00003.safetensors"]
    assert torch.equal(own, weight[1200:1900])
    assert alone["torch"].tolist() == [1] * 5

    across = torch.empty(2000)
    checkpoint.read("w", 500, across)
    assert torch.equal(across, weight[500:2500])
    assert checkpoint.written_alone("random/2/")["torch"].tolist() == [2] * 5
    assert checkpoint.written_alone("random/3/") == {}
    assert sorted(opened) == [f"rank-0000{rank}-of-00003.safetensors" for rank in range(3)]
