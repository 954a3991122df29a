"""The allocator of tensors in main memory holds little more than the tensors took at most."""

import json
import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import json
import psutil
import torch
MB = 10**6
from pipeline.kernels.host_allocator import keep_freed_memory

keep_freed_memory()
process = psutil.Process()
torch.ones(MB)  # starts the threads
before = process.memory_info().rss
held = lambda: (process.memory_info().rss - before) / MB
filled = lambda megabytes: torch.ones(megabytes * MB // 4)

pointers = {each.data_ptr() for each in [filled(40) for _ in range(8)]}
reused = pointers == {each.data_ptr() for each in [filled(40) for _ in range(8)]}
others = [filled(60) for _ in range(5)]
other_sizes = held()
del others
layers = []
for _ in range(60):
    x = filled(10)
    layers.append((x + 1) * 2 + 1)
    del x
print(json.dumps([reused, other_sizes, held()]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a compiler"
)
def test_freed_memory_is_reused_and_its_holes_are_returned() -> None:
    said = subprocess.check_output([sys.executable, "-c", PROGRAM])

    reused, other_sizes, layers = json.loads(said)
    assert reused
    most = 17 / 16 * 65 / 64  # a sixteenth more than the highest use, and rounding to a 64th
    assert other_sizes < 320 * most + 5
    assert layers < 630 * most + 5
