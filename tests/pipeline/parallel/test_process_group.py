"""Choice of the GPU of a process, and its end while others wait."""

import os
import subprocess
import sys
import time

import pytest
import torch

WAITS = """
import sys, threading, time
from pipeline.parallel.process_group import hard_exit
threading.Thread(target=time.sleep, args=(600,)).start()  # for which the interpreter's end waits
sys.stdout.write("said before")
hard_exit(7, {abort}, seconds=0.5)
"""


def ended(program: str, **environment: str) -> tuple[int, str, float]:
    """Exit code, standard output and seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    began = time.monotonic()
    try:
        said, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, said, time.monotonic() - began


@pytest.mark.parametrize("abort", ["lambda: time.sleep(600)", "lambda: 1 / 0", "lambda: None"])
def test_a_process_that_failed_ends_by_its_code_whatever_waits(abort: str) -> None:
    code, said, _ = ended(WAITS.format(abort=abort))

    assert (code, said) == (7, "said before")


FAILS = """
import time, torch
from contextlib import nullcontext
from pipeline.system.errors import JobFailed
from pipeline.parallel.process_group import process_group
with process_group(lambda _: nullcontext()):
    x = torch.ones(8, device="cuda")
    torch.distributed.all_reduce(x)
    torch.cuda._sleep(200 * 10**9)  # as a collective does to which the others do not come
    raise JobFailed(3)
"""


@pytest.mark.gpu
def test_a_failed_process_does_not_wait_for_its_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}

    code, _, seconds = ended(FAILS, MASTER_PORT="29519", **alone)

    assert code == 3
    assert seconds < 60  # and not the two minutes for which the GPU is busy
