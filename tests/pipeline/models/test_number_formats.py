"""Formats that a processor has no instructions for, on the one at hand and held to AVX2."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.launch.local import PLANNED

ROOT = Path(__file__).parent.parent.parent.parent
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or torch.cuda.is_available(),
    reason="needs an x86 processor and no GPU",
)


PROGRAM = """
import os, sys
from dataclasses import replace
from pipeline.config import FrozenModelConfig
from pipeline.models.number_formats import is_slow, slow_formats
from pipeline.models.load import weight_dtype
from step3_ppo.config import PPOConfig
import torch
print([is_slow(each) for each in ("auto", "fp32", "bf16", "fp16")])
print(weight_dtype("auto", torch.device("cpu")))
config = PPOConfig()
print(slow_formats(config, section="ppo"))
config = replace(config, actor=replace(config.actor, precision="bf16"),
                 reward=FrozenModelConfig(precision="bf16"))
print(slow_formats(config, section="ppo"))
os.environ[sys.argv[1]] = "1"
print(slow_formats(config, section="ppo"))
"""


def printed(**variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != PLANNED}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, PLANNED],
        cwd=ROOT,
        env={**environment, **AVX2, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SENTENCE = (
    "this processor has no instructions for bf16, and fp32 is several times as fast here, in more"
    " memory:"
)


@pytest.mark.jobs
def test_a_step_says_at_its_start_which_format_is_slow_and_what_to_set_instead() -> None:
    assert printed() == [
        "[False, False, True, True]",
        "torch.float32",
        "None",
        f"{SENTENCE} --actor.precision fp32 --reward.precision fp32",
        f"{SENTENCE} --ppo.actor.precision fp32 --ppo.reward.precision fp32",
    ]
