"""Freed memory is used again."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.engine.host_memory import OWN_SETTINGS, keep_freed_memory

ROOT = Path(__file__).parents[3]

FAULTS = """
import resource, torch
from pipeline.engine.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16_000_000)  # 64 MB: 15,625 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = min(faults() for _ in range(10))
kept = keep_freed_memory()
after = [faults() for _ in range(20)]
print(kept, before, after[0], after[-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is Linux's")
def test_after_a_while_a_tensor_lies_where_earlier_ones_were() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True
    )

    kept, before, first, last = done.stdout.split()
    if kept == "False":
        pytest.skip("malloc isn't glibc's, or has settings of the user's own")
    assert int(before) > 15_000
    assert int(first) > 15_000
    assert int(last) < 100


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_a_users_own_settings_stand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")

    assert not keep_freed_memory()
