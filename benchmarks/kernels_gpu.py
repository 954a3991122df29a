"""Benchmark the CUDA kernels against PyTorch and the GPU's memory bandwidth.

    python -m benchmarks.kernels_gpu
    python -m benchmarks.kernels_gpu --tiny     # the same with small sizes, on any device

Compares AdamW on 1.3B parameters with PyTorch's fused AdamW plus casts, and decode attention with
scaled_dot_product_attention on the same keys. CUDA graphs are replayed over more memory than the
cache holds. `share` is the fraction of a copy's bandwidth; targets are 0.85 for AdamW and 0.75 for
attention with 64 or more sequences. `tests/pipeline/kernels/test_device.py` tests the kernels.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.device import (
    DEVICE,
    REPEATS,
    Fallbacks,
    Row,
    copy_bandwidth,
    emit,
    median_seconds,
    time_call,
)
from benchmarks.kernels import BYTES, composed_step, our_step, torch_adamw
from pipeline.kernels.decode_attention import PAGE, AttentionSpec, decode_attention, gather_pages

BEYOND_CACHE = 256 << 20
"""Bytes of keys and values that timed calls read: several times the L2 cache of an H200."""

HEADS = {
    "OPT-1.3B": (32, 32, 64),
    "Llama-7B": (32, 32, 128),
    "Llama-3-8B": (32, 8, 128),
    "Llama-3-70B, an eighth": (8, 1, 128),
}
"""Query heads, key/value heads and head size, by model."""


def time_adamw(bandwidth: float, *, tiny: bool) -> Iterator[Row]:
    """Time AdamW with fp32 master weights and bf16 copies, and with split master weights."""
    count = 1000 if tiny else 1_320_000_000
    for form in ("mixed", "mixed-split"):
        seconds: list[float] = []
        for make in (our_step, partial(composed_step, make=torch_adamw)):
            with DEVICE:
                step = make(count, form)
            step()
            seconds.append(statistics.median(time_call(step) for _ in range(REPEATS)))
            del step
        ours, pytorch = seconds
        share = BYTES[form] * count / bandwidth / ours
        yield {"adamw": form, "ours": ours, "pytorch": pytorch, "share": share}


def time_attention(bandwidth: float, *, tiny: bool) -> Iterator[Row]:
    """Time attention of one new token per sequence, in bf16, with sequences of equal length."""
    shapes = [(1, 20)] if tiny else [(64, 512), (512, 512), (1, 2048), (16, 8192)]
    for batch, length in shapes:
        for model, (heads, kv_heads, head_size) in HEADS.items():
            num_bytes = 4 * batch * length * kv_heads * head_size
            pages_per_row = -(-length // PAGE)
            pages = (
                torch.randperm(batch * pages_per_row, device=DEVICE)
                .int()
                .view(batch, pages_per_row)
            )
            shape = (batch * pages_per_row, kv_heads, PAGE, head_size)
            caches = [
                [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
                for _ in range(1 if tiny else -(-BEYOND_CACHE // num_bytes))
            ]
            query = torch.randn(batch, heads, head_size, device=DEVICE, dtype=torch.bfloat16)
            lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
            spec = AttentionSpec(lengths=lengths, pages=pages, scaling=head_size**-0.5)

            ours = [
                partial(decode_attention, query, *cache, spec, longest=length) for cache in caches
            ]
            references = [
                partial(
                    F.scaled_dot_product_attention,
                    query[:, :, None],
                    *(gather_pages(stored, pages)[:, :, :length] for stored in cache),
                    enable_gqa=True,
                )
                for cache in caches
            ]
            seconds = median_seconds(ours)
            yield {
                "attention": f"{model}, {batch} x {length}",
                "ours": seconds,
                "pytorch": median_seconds(references),
                "share": num_bytes / bandwidth / seconds,
            }


def main(argv: Sequence[str]) -> None:
    """Benchmark every kernel and report the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="use small sizes, to test the script")
    args = parser.parse_args(argv)
    fallbacks = Fallbacks()
    bandwidth = copy_bandwidth()
    emit("copy", bandwidth=bandwidth)
    for measure in (time_adamw, time_attention):
        for row in measure(bandwidth, tiny=args.tiny):
            emit("kernel", **row)
    fallbacks.report()


if __name__ == "__main__":
    main(sys.argv[1:])
