"""Count the bytes of a process's tensors, whatever system created them."""

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def live_bytes() -> int:
    """Return the bytes of this process's live tensors, counting each storage once.

    Tensors are found through the garbage collector, and their gradients are also counted.
    """
    gc.collect()
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if not issubclass(type(item), Tensor) or hasattr(item, "_local_tensor"):
            continue  # the local shard of a DTensor is listed separately
        tensors = [item, item.grad] if item.is_leaf else [item]
        for tensor in tensors:
            if tensor is not None and not hasattr(tensor, "_local_tensor"):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def measure_peak_bytes(step: Callable[[], None]) -> int:
    """Return the peak bytes of tensors during a step: live tensors plus the step's allocations.

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
    allocated = peak = 0
    for _, change in changes:
        allocated += change
        peak = max(peak, allocated)
    return before + peak


def reset_peak_rss() -> None:
    """Reset the peak RSS of this process."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Return the peak RSS in bytes since the last reset, including shared pages."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")
