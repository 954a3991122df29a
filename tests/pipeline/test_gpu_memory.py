"""The allocator's segments grow, unless a user has settings of their own."""

import subprocess
import sys

import pytest
import torch

from pipeline.gpu_memory import use_expandable_segments

PROBE = """
import torch
from pipeline.gpu_memory import use_expandable_segments
use_expandable_segments()
held = [torch.empty(40 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(8)]
del held
before = torch.cuda.memory_reserved()
whole = torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_reserved() == before)
"""


def test_what_a_user_says_in_the_environment_holds() -> None:
    environment = {"HOME": "/"}
    assert use_expandable_segments(environment)
    assert environment == {"HOME": "/", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "max_split_size_mb:64"}
        assert not use_expandable_segments(own)
        assert own == {name: "max_split_size_mb:64"}


@pytest.mark.gpu
def test_memory_that_was_freed_in_pieces_serves_a_larger_request() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    said = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)

    assert said.stdout.split() == ["True"]
