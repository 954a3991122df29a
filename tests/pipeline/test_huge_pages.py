import re
import sys
from pathlib import Path

import pytest
import torch

from pipeline.huge_pages import HUGE_PAGE, zeros_like

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised_at(address: int) -> bool:
    """Whether the system was asked for huge pages where an address lies."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3 * HUGE_PAGE)])
def test_zeros_have_the_shape_and_the_format_that_are_asked_for(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    found = zeros_like(torch.ones(1, dtype=dtype), *shape)

    assert found.shape == shape
    assert found.dtype == dtype
    assert not found.any()


@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
@pytest.mark.skipif(not SETTING.exists(), reason="the kernel has no transparent huge pages")
def test_large_memory_is_asked_for_in_huge_pages() -> None:
    found = zeros_like(torch.ones(1), 4 * HUGE_PAGE)

    assert advised_at(found.data_ptr() + found.nbytes // 2)
