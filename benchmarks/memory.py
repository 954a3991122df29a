"""Memory of the tensors of a process, counted independently of the system that made them."""

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


def live_bytes() -> float:
    """Bytes of the tensors that are alive now on this process, each storage once.

    Garbage collection finds the tensors, and their gradients. Pages of shared-memory files that
    were written count once, divided among the processes.
    """
    gc.collect()
    shared = _shared_ranges()
    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if not issubclass(type(each), Tensor) or hasattr(each, "_local_tensor"):
            continue  # the local shard of a DTensor is listed separately
        tensors = [each, each.grad] if each.is_leaf else [each]
        for tensor in tensors:
            if tensor is None or hasattr(tensor, "_local_tensor"):
                continue
            storage = tensor.untyped_storage()
            if not any(start <= storage.data_ptr() < end for start, end in shared):
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values()) + _shared_bytes()


def measure_peak_bytes(step: Callable[[], None]) -> float:
    """Peak bytes of tensors during one step: live tensors plus the step's allocations.

    The profiler reports each allocation and release. Internal buffers of collective libraries are
    not included; peak RSS includes them.
    """
    before = live_bytes()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # torch 2.11 warns without it
    ) as profile:
        step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    held = highest = 0
    for _, change in changes:
        held += change
        highest = max(highest, held)
    return before + highest


def reset_peak_rss() -> None:
    """Reset the peak RSS."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Peak RSS since the last reset, shared pages included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def _shared_ranges() -> list[tuple[int, int]]:
    """Address ranges of mapped shared-memory files."""
    return [(start, end) for start, end, _ in _shared_mappings()]


def _shared_mappings() -> list[tuple[int, int, int]]:
    """Start, end and inode of each mapping of a shared-memory file."""
    found: list[tuple[int, int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            addresses, _, _, _, inode, *_ = line.split()
            start, end = addresses.split("-")
            found.append((int(start, 16), int(end, 16), int(inode)))
    return found


def _shared_bytes() -> float:
    """This process's share of the pages of mapped shared-memory files."""
    sizes: dict[int, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(link.readlink()).startswith("/memfd:"):
                status = link.stat()
                sizes[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:  # the descriptor of the directory listing itself
            continue
    own = (sizes, {inode for _, _, inode in _shared_mappings()})
    everyone = [own]
    if dist.is_initialized():
        everyone = [own] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    known = {inode: size for each, _ in everyone for inode, size in each.items()}
    users = Counter(inode for _, mapped in everyone for inode in mapped)
    return sum(known.get(inode, 0) / users[inode] for inode in own[1])
