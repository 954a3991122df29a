"""What comes back from the disk is what was written last, or a sentence."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.engine.offload import TensorStore
from pipeline.errors import ConfigError, OffloadError
from tests.slow_disk import slow_down_writes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_tensor(numel: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """Any bits at all, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def read(store: TensorStore, key: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.zeros(numel, dtype=dtype)
    store.read(key, out)
    store.wait(key)
    return out


def damage(store: TensorStore, size: int) -> None:
    """Cut the store's file to `size` bytes."""
    with Path(f"/proc/self/fd/{store._file.fileno()}").open("r+b") as file:
        file.truncate(size)


def test_200_random_operations_agree_with_a_dict(tmp_path: Path) -> None:
    choose = random.Random(0)
    sizes = {f"k{index}": choose.choice([0, 1, 1023, 1024, 4097]) for index in range(12)}
    dtypes = {key: DTYPES[index % 3] for index, key in enumerate(sizes)}
    store, oracle, reads = TensorStore(tmp_path, rank=3, threads=3), {}, 0
    for key, size in sizes.items():
        store.reserve({key: size}, dtypes[key])

    for operation in range(200):
        key = choose.choice(list(sizes))
        if key not in oracle or choose.random() < 0.5:
            oracle[key] = random_tensor(sizes[key], dtypes[key], seed=operation)
            store.write(key, oracle[key])  # the old tensor lives on while it is being written
        else:
            assert same_bits(read(store, key, sizes[key], dtypes[key]), oracle[key])
            reads += 1

    store.flush()
    assert reads > 50
    for key, expected in oracle.items():
        assert same_bits(read(store, key, sizes[key], dtypes[key]), expected)
    store.close()


def test_a_buffer_is_filled_anew_only_after_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down_writes(monkeypatch, seconds=0.05)
    store = TensorStore(tmp_path, rank=0, threads=4)
    store.reserve({"old": 10, "new": 10}, torch.float32)
    store.write("new", torch.full((10,), 2.0))
    store.flush()
    buffer = torch.full((10,), 1.0)

    store.write("old", buffer)
    store.read("new", buffer, after="old")
    store.flush()

    assert buffer.tolist() == [2.0] * 10
    assert read(store, "old", 10).tolist() == [1.0] * 10
    store.close()


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, rank=5)
    store.reserve({"a": 4097}, torch.float32)
    store.write("a", random_tensor(4097))
    store.flush()
    damage(store, 4000)

    store.read("a", torch.zeros(4097))
    with pytest.raises(OffloadError) as error:
        store.wait("a")

    assert str(error.value) == (
        f"a can't be read in the offload file of rank 5 in {tmp_path}: the file ends at byte 4000"
    )
    with pytest.raises(OffloadError):
        store.write("a", random_tensor(4097))
    store.close()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = TensorStore(tmp_path / "scratch", rank=1)

    with pytest.raises(ConfigError) as error:
        store.reserve({"a": 2**50, "b": 2**50}, torch.float32)

    assert "lacks the 9,007,199,254,740,992 bytes that rank 1 needs" in str(error.value)
    store.reserve({"a": 1}, torch.float32)  # nothing of it was kept
    store.close()
