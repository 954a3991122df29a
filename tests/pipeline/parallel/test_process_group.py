"""Exit of a failed process while its threads or its GPU are busy."""

import os
import subprocess
import sys
import time

import pytest
import torch

WAITS = """
import sys, threading, time
from pipeline.parallel.process_group import hard_exit
threading.Thread(target=time.sleep, args=(600,)).start()  # the interpreter waits for it at exit
sys.stdout.write("written before")
hard_exit(7, {abort}, seconds=0.5)
"""


def run_program(program: str, **environment: str) -> tuple[int, str, float]:
    """Exit code, standard output and seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    start = time.monotonic()
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, output, time.monotonic() - start


@pytest.mark.parametrize("abort", ["lambda: time.sleep(600)", "lambda: 1 / 0", "lambda: None"])
def test_failed_process_exits_with_its_code_despite_busy_threads(abort: str) -> None:
    code, output, _ = run_program(WAITS.format(abort=abort))

    assert (code, output) == (7, "written before")


FAILS = """
import time, torch
from contextlib import nullcontext
from pipeline.system.errors import JobFailed
from pipeline.parallel.process_group import process_group
with process_group(lambda _: nullcontext()):
    x = torch.ones(8, device="cuda")
    torch.distributed.all_reduce(x)
    torch.cuda._sleep(200 * 10**9)  # like a collective that other processes never join
    raise JobFailed(3)
"""


@pytest.mark.gpu
def test_failed_process_does_not_wait_for_its_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}

    code, _, seconds = run_program(FAILS, MASTER_PORT="29519", **environment)

    assert code == 3
    assert seconds < 60  # the GPU is busy for two minutes
