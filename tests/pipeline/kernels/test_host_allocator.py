"""The allocator of tensors in host memory holds little more than the tensors took at most."""

import json
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import json
import psutil
import torch
from pipeline.kernels.host_allocator import keep_freed_memory, return_freed_memory

keep_freed_memory()
torch.ones(10**6)  # starts the threads
before = psutil.Process().memory_info().rss
held = lambda: (psutil.Process().memory_info().rss - before) / 1e6
filled = lambda megabytes: torch.ones(megabytes * 10**6 // 4)

layers = []
for _ in range(50):
    x = filled(12)
    layers.append((x + 1) * 2 + 1)
    del x
with_layers = held()
del layers
pointers = {each.data_ptr() for each in [filled(60) for _ in range(8)]}
reused = pointers == {each.data_ptr() for each in [filled(60) for _ in range(8)]}
layers = [filled(100) for _ in range(5)]
other_sizes = held()
del layers
return_freed_memory()
print(json.dumps([reused, other_sizes, with_layers, held()]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a compiler"
)
def test_freed_memory_is_reused_and_its_holes_are_returned() -> None:
    said = subprocess.check_output([sys.executable, "-c", PROGRAM])

    reused, other_sizes, with_layers, at_last = json.loads(said)
    assert reused
    # 256 MiB more than the highest use, of sizes rounded to a 16th; all of them would take 1,580.
    most = (53 * 12 + 1.048576 * 256) * 17 / 16
    assert with_layers < most
    assert other_sizes < most
    assert at_last < 20
