"""Benchmark the engine on one GPU: its overhead over plain PyTorch.

    python -m benchmarks.engine_gpu [--systems plain "stage 0" ...]
    python -m benchmarks.engine_gpu --tiny      # the same with a tiny model, on any device

Trains an OPT-1.3B with random weights in bf16, with fp32 master weights, clipping and fused AdamW,
on 8 sequences of 512 tokens: in a plain loop, at stages 0 to 3, and with offload. Nothing is
downloaded. With the optimizer on the host, two steps are measured; the target is 0.5 s.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import OPTForCausalLM

from benchmarks.device import DEVICE, GPU, Fallbacks, emit, pop_peak_bytes, report_errors, time_call
from benchmarks.engine_systems import engine_step, step_with_masters
from benchmarks.ppo_gpu import opt_config
from pipeline.system.torch_process import use_expandable_segments

PLAIN = "plain"

SYSTEMS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "stage 3, parameters on the host": (3, {"params": "cpu"}),
    "stage 2, gradients on the host": (2, {"gradients": "cpu"}),
    "stage 2, optimizer on the host": (2, {"optimizer": "cpu"}),
}
"""ZeRO stage and settings of `OffloadConfig`, by system."""

WARM_UP = 3
"""Number of steps before timing starts."""


def measure(system: str, *, tiny: bool, steps: int) -> float:
    """Return the median seconds per step of OPT-1.3B, or of two narrow layers if `tiny`."""
    torch.manual_seed(0)
    with DEVICE:
        model: Any = OPTForCausalLM(opt_config(64 if tiny else 2048, use_cache=False))
        ids = torch.randint(0, 512, (2, 32) if tiny else (8, 512))
    model.to(torch.bfloat16).train()
    if system == PLAIN:
        masters = [nn.Parameter(param.detach().float()) for param in model.parameters()]
        step = step_with_masters(model, masters)
    else:
        stage, offload = SYSTEMS[system]
        step = engine_step(model, stage, **offload)
    for _ in range(WARM_UP):
        step(ids)
    pop_peak_bytes()
    return statistics.median(time_call(partial(step, ids)) for _ in range(steps))


def main(argv: Sequence[str]) -> None:
    """Measure every system and report rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (PLAIN, *SYSTEMS)
    parser.add_argument("--systems", nargs="+", choices=names, default=names)
    parser.add_argument("--tiny", action="store_true", help="use a toy model")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args(argv)
    use_expandable_segments()
    fallbacks = Fallbacks()
    seconds: dict[str, float] = {}
    for system in args.systems:
        with report_errors("engine", system=system):
            steps = 2 if args.tiny or "optimizer" in system else args.steps
            seconds[system] = measure(system, tiny=args.tiny, steps=steps)
            over = seconds[system] / seconds.get(PLAIN, float("nan")) - 1
            emit("engine", system=system, seconds=seconds[system], over=over, peak=pop_peak_bytes())
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
    fallbacks.report()


if __name__ == "__main__":
    main(sys.argv[1:])
