"""The store returns what was written last, or raises."""

import gc
import os
import random
import struct
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.engine.sharding.offload import TensorStore
from pipeline.system.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def random_tensor(numel: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """Return random bits, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def read(store: TensorStore, key: str, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.zeros(numel, dtype=dtype)
    store.read(key, out)
    store.wait(key)
    return out


def test_200_random_operations_match_a_dict(tmp_path: Path) -> None:
    rng = random.Random(0)
    sizes = {f"k{index}": rng.choice([0, 1, 1023, 1024, 4097]) for index in range(12)}
    dtypes = {key: DTYPES[index % 3] for index, key in enumerate(sizes)}
    store, expected, reads = TensorStore(tmp_path, rank=3, threads=3), {}, 0
    for key, size in sizes.items():
        store.reserve({key: size}, dtypes[key])
    needed = sum(size * dtypes[key].itemsize for key, size in sizes.items())
    assert os.fstat(store._file.fileno()).st_size >= needed

    for operation in range(200):
        key = rng.choice(list(sizes))
        if key not in expected or rng.random() < 0.5:
            expected[key] = random_tensor(sizes[key], dtypes[key], seed=operation)
            store.write(key, expected[key])  # the previous tensor may still be written
        else:
            assert same_bits(read(store, key, sizes[key], dtypes[key]), expected[key])
            reads += 1

    store.flush()
    assert reads > 50
    for key, tensor in expected.items():
        assert same_bits(read(store, key, sizes[key], dtypes[key]), tensor)
    store.close()


def test_disk_that_is_too_small_raises_before_anything_is_written(tmp_path: Path) -> None:
    store = TensorStore(tmp_path / "scratch", rank=1)

    with pytest.raises(ConfigError) as error:
        store.reserve({"a": 2**50, "b": 2**50}, torch.float32)

    assert "space: rank 1 needs 9,007,199,254,740,992 bytes" in str(error.value)
    store.reserve({"a": 1}, torch.float32)  # the failed reservation has no effect
    store.close()


def test_collected_store_closes_its_file_without_waiting_for_threads(tmp_path: Path) -> None:
    """Garbage collection may run in a thread that holds locks which the store's threads need."""
    store, blocked = TensorStore(tmp_path, rank=0, threads=1), threading.Event()
    store.reserve({"k": 4}, torch.float32)
    scratch = weakref.ref(store._file)
    descriptor = os.dup(store._file.fileno())
    threads = store._threads
    threads.submit(blocked.wait, 20)
    store.write("k", torch.ones(4))
    future = store._pending["k"]

    store.__dict__["cycle"] = store
    del store
    gc.collect()

    assert not future.done()
    blocked.set()
    threads.shutdown()
    assert struct.unpack("4f", os.pread(descriptor, 16, 0)) == (1.0, 1.0, 1.0, 1.0)
    os.close(descriptor)
    del future
    assert scratch() is None
