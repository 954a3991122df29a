"""Formats that a processor has no instructions for, on the one at hand and held to AVX2."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.launch.environment import PLANNED

ROOT = Path(__file__).parent.parent.parent.parent
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or torch.cuda.is_available(),
    reason="needs an x86 processor and no GPU",
)


def test_a_step_says_at_its_start_which_format_is_slow_and_what_to_set_instead() -> None:
    program = """
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
    environment = {name: value for name, value in os.environ.items() if name != PLANNED}
    done = subprocess.run(
        [sys.executable, "-c", program, PLANNED],
        cwd=ROOT,
        env={**environment, **AVX2},
        capture_output=True,
        text=True,
        check=False,
    )
    sentence = (
        "this processor has no instructions for bf16, and fp32 is several times as fast here, in"
        " more memory:"
    )

    assert done.stdout.splitlines() == [
        "[False, False, True, True]",
        "torch.float32",
        "None",
        f"{sentence} --actor.precision fp32 --reward.precision fp32",
        f"{sentence} --ppo.actor.precision fp32 --ppo.reward.precision fp32",
    ], done.stderr
