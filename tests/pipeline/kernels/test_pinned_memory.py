"""Pinned memory, with a driver that locks a mebibyte at most."""

import mmap

import torch

from pipeline.kernels.pinned_memory import PinnedMemory

MIB = 2**20


class Driver:
    """Locks a mebibyte at most."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0
        if sum(self.locked.values()) + num_bytes > MIB:
            return 2
        self.locked[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_pages_are_reused_after_the_last_view_is_freed() -> None:
    driver = Driver()
    memory = PinnedMemory(driver.register, driver.unregister)
    vector = memory.empty(1000, torch.float32)
    vector.fill_(1.0)
    address, view = vector.data_ptr(), vector[10:]
    del vector
    second = memory.empty(1000, torch.float32)
    assert second.data_ptr() != address
    del view

    assert memory.empty(900, torch.float32).data_ptr() == address
    assert sum(driver.locked.values()) == 2 * mmap.PAGESIZE
