"""The host allocator holds little more memory than the peak of its tensors."""

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
pointers = {x.data_ptr() for x in [filled(60) for _ in range(8)]}
reused = pointers == {x.data_ptr() for x in [filled(60) for _ in range(8)]}
layers = [filled(100) for _ in range(5)]
other_sizes = held()
del layers
return_freed_memory()
print(json.dumps([reused, other_sizes, with_layers, held()]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="needs Linux and a compiler"
)
def test_freed_memory_is_reused_and_can_be_returned() -> None:
    output = subprocess.check_output([sys.executable, "-c", PROGRAM])

    reused, other_sizes, with_layers, finally_held = json.loads(output)
    assert reused
    # The peak plus 256 MiB, with sizes rounded to a 16th; all tensors together would take 1,580.
    limit = (53 * 12 + 1.048576 * 256) * 17 / 16
    assert with_layers < limit
    assert other_sizes < limit
    assert finally_held < 20
