"""One way to do the work of an optimizer step, on request: a process of `benchmarks/kernels.py`.

    python -m benchmarks.kernels_worker --way ours-mixed --parameters 10000000 --threads 1

It prints `ready`, then for each line of its input the seconds of the second of two steps. A way
with `mixed` has bf16 gradients and ends in bf16 weights: gradients times a clip coefficient, AdamW
on fp32 masters and moments, the rounded weights. With `split` the weights and 16 bits more are the
master.
"""

import argparse
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CLIP = 0.37
SETTINGS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BF16 = torch.bfloat16


def ours(numel: int, way: str) -> Callable[[], None]:
    """The kernel."""
    from pipeline.kernels.adamw.definition import AdamW, Weights, new_moments, split_master
    from pipeline.kernels.adamw.dispatch import adamw_

    mixed, split = "mixed" in way, "split" in way
    moments = BF16 if "bf16-moments" in way else torch.float32
    moments = torch.uint8 if "8bit-moments" in way else moments
    master, low_bits = torch.randn(numel), None
    if split:
        master, low_bits = split_master(master)
    weights = Weights(
        master,
        **new_moments(torch.zeros(numel), moments),
        copy=torch.zeros(numel, dtype=BF16) if mixed and not split else None,
        low_bits=low_bits,
    )
    gradient = torch.randn(numel).to(BF16 if mixed else torch.float32)
    step = AdamW(**SETTINGS, step=3, multiplier=CLIP if mixed else 1.0)
    return lambda: adamw_(weights, gradient, step, kernels="required")


def stream(numel: int, way: str) -> Callable[[], None]:
    """As much memory, next to no arithmetic."""
    from pipeline.kernels.toolchain.cpp import build
    from pipeline.kernels.toolchain.threads import parallel

    narrow, split = "mixed" in way, "split" in way
    bits = 8 if "8bit-moments" in way else 16 if "bf16-moments" in way else 32
    source = Path(__file__).with_name("stream.cpp")
    library = build(source, {"NARROW": int(narrow), "SPLIT": int(split), "MOMENTS": bits}).library
    width, master = (torch.int16 if narrower else torch.int32 for narrower in (narrow, split))
    state = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
    vectors = [torch.ones(numel, dtype=dtype) for dtype in (master, state, state, width)]
    vectors.append(torch.ones(numel if narrow else 1, dtype=width))
    threads = torch.get_num_threads()

    def step() -> None:
        library.stream(
            *(ctypes.c_void_p(vector.data_ptr()) for vector in vectors),
            ctypes.c_int64(numel),
            parallel(),
            ctypes.c_int32(threads),
        )

    return step


def torch_fused(numel: int, way: str) -> Callable[[], None]:
    """`torch.optim.AdamW(fused=True)`, and what is missing for the mixed way."""
    param = nn.Parameter(torch.randn(numel))
    return composed(param, torch.optim.AdamW([param], **SETTINGS, fused=True), way)


def deepspeed(numel: int, way: str) -> Callable[[], None]:
    """DeepSpeedCPUAdam, and what its offload does around it in the mixed way."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    param = nn.Parameter(torch.randn(numel))
    return composed(param, DeepSpeedCPUAdam([param], **SETTINGS), way)


def composed(param: Tensor, optimizer: torch.optim.Optimizer, way: str) -> Callable[[], None]:
    """Gradient to fp32, times the coefficient, the step, the rounded weights: a pass for each."""
    param.grad = torch.randn(param.numel())
    gradient, weights = (torch.zeros(param.numel(), dtype=BF16) for _ in range(2))
    gradient.copy_(param.grad)

    @torch.no_grad()
    def mixed() -> None:
        assert param.grad is not None
        param.grad.copy_(gradient)
        param.grad.mul_(CLIP)
        optimizer.step()
        weights.copy_(param)

    return mixed if "mixed" in way else optimizer.step  # pyright: ignore[reportReturnType]


WAYS = {"ours": ours, "stream": stream, "torch": torch_fused, "deepspeed": deepspeed}


def main(argv: Sequence[str]) -> None:
    """Read the options, then answer requests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--way", required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    step = WAYS[args.way.partition("-")[0]](args.parameters, args.way)
    for _ in range(2):
        step()
    gc.disable()
    sys.stdout.write("\nready\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        step()
        started = time.perf_counter()
        step()
        sys.stdout.write(f"{time.perf_counter() - started}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
