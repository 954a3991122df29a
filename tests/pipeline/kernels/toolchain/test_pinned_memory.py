"""Locked pages are those that are asked for; the emulator's driver counts, and locks a MiB."""

import mmap

import pytest
import torch

from pipeline.errors import KernelError
from pipeline.kernels.emulator.emulated import Emulator
from pipeline.kernels.toolchain.driver import Driver
from pipeline.kernels.toolchain.pinned_memory import PinnedMemory, pinned_empty

KIB = 2**10


def test_as_much_is_locked_as_is_asked_for_and_not_a_power_of_two(emulator: Emulator) -> None:
    memory = PinnedMemory(Driver(emulator.library))

    vectors = [memory.empty(n * KIB, torch.float32) for n in (33, 65, 129)]

    # PyTorch's own would lock 256, 512 and 1,024 KiB.
    assert memory.num_bytes == emulator.locked_bytes == 4 * (33 + 65 + 129) * KIB
    for number in range(3):
        vectors[number].fill_(number)
    assert [vector.unique().tolist() for vector in vectors] == [[0.0], [1.0], [2.0]]
    assert all(vector.data_ptr() % mmap.PAGESIZE == 0 for vector in vectors)
    odd = memory.empty(5, torch.bfloat16)
    assert odd.shape == (5,)
    assert memory.empty(0, torch.float32).numel() == 0
    assert emulator.locked_bytes == 4 * (33 + 65 + 129) * KIB + mmap.PAGESIZE
    del vectors, odd
    memory.release()
    assert memory.num_bytes == emulator.locked_bytes == 0


def test_what_is_given_back_is_used_again_once_no_view_of_it_is_left(emulator: Emulator) -> None:
    memory = PinnedMemory(Driver(emulator.library))
    vector = memory.empty(64 * KIB, torch.float32)
    address, view = vector.data_ptr(), vector[5:]
    del vector

    other = memory.empty(64 * KIB, torch.float32)
    assert other.data_ptr() != address
    assert emulator.locked_bytes == 512 * KIB

    del view
    again = memory.empty(128 * KIB, torch.bfloat16)
    assert again.data_ptr() == address
    assert emulator.locked_bytes == 512 * KIB
    del other, again
    memory.release()


def test_what_is_kept_makes_room_for_another_size(emulator: Emulator) -> None:
    memory = PinnedMemory(Driver(emulator.library))
    memory.empty(600 * KIB, torch.uint8)  # and let go

    vector = memory.empty(700 * KIB, torch.uint8)

    assert emulator.locked_bytes == 700 * KIB
    with pytest.raises(KernelError, match=r"lock 614400 bytes: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        memory.empty(600 * KIB, torch.uint8)
    assert emulator.locked_bytes == memory.num_bytes == 700 * KIB
    del vector
    memory.release()


@pytest.mark.gpu
def test_copies_from_it_need_no_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]

    vector = pinned_empty(3 * 2**20, torch.float32)

    assert vector.is_pinned()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == before
    expected = torch.arange(vector.numel(), dtype=torch.float32)
    vector.copy_(expected)
    torch.cuda._sleep(100_000_000)  # the GPU comes to the copy when the call is long over
    on_gpu = vector.to("cuda", non_blocking=True)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(on_gpu.cpu(), expected)
