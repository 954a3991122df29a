"""The phase `decode` of `benchmarks.kernels_gpu`: attention of one new token of each sequence."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels_gpu_bench import HEADS, Bench
from pipeline.kernels.decode_attention import cuda
from pipeline.kernels.decode_attention.definition import Scores

BEYOND_CACHE = 256 << 20
"""Bytes that timed buffers have together at least: four times the second-level cache of an H200."""


@dataclass(frozen=True)
class Decoding:
    """One call of decode attention, in bf16, all sequences of one length."""

    model: str
    batch: int
    length: int
    num_splits: int | None = None

    @property
    def num_bytes(self) -> int:
        """Of the keys and values."""
        _, kv_heads, size = HEADS[self.model]
        return 2 * 2 * self.batch * self.length * kv_heads * size


def run_decode(bench: Bench, _: argparse.Namespace) -> None:
    """Batches and lengths of four models, beside attention of PyTorch; then numbers of splits."""
    cases = [
        Decoding(model, batch, length)
        for length in (512, 2048, 128, 8192)
        for batch in (64, 16, 1, 256)
        for model in HEADS
    ]
    cases += [
        Decoding("Llama-3-8B", batch, length, splits)
        for batch in (1, 16)
        for length in (2048, 8192)
        for splits in (1, 2, 4, 8, 16, 32)
    ]
    cases = [case for case in cases if case.num_bytes < 32 << 30]
    if bench.tiny:
        cases = [Decoding("Llama-3-70B, an eighth", 1, 20), Decoding("OPT-1.3B", 1, 9, 2)]
    for case in bench.in_time("decode", cases):
        _time_decoding(bench, case)


def _time_decoding(bench: Bench, case: Decoding) -> None:
    heads, kv_heads, size = HEADS[case.model]
    device, scaling = bench.gpu.device, size**-0.5
    width = case.length + 32  # a slot is wider than its sequence
    copies = 1 if bench.tiny else -(-BEYOND_CACHE // case.num_bytes)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    caches = [[numbers(case.batch, kv_heads, width, size) for _ in range(2)] for _ in range(copies)]
    query = numbers(case.batch, heads, size)
    lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device=device)
    scores = Scores(lengths=lengths, scaling=scaling)
    mask = (torch.arange(width, device=device) < case.length).expand(case.batch, 1, 1, width)

    def ours(key: Tensor, value: Tensor) -> Tensor:
        return cuda.decode_attention(
            query,
            key,
            value,
            scores,
            gpu=bench.gpu,
            longest=case.length,
            num_splits=case.num_splits,
        )

    def masked(key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query[:, :, None], key, value, attn_mask=mask, scale=scaling, enable_gqa=True
        )

    def live(key: Tensor, value: Tensor) -> Tensor:
        key, value = key[:, :, : case.length], value[:, :, : case.length]
        return F.scaled_dot_product_attention(
            query[:, :, None], key, value, scale=scaling, enable_gqa=True
        )

    def timed(attend: Callable[[Tensor, Tensor], Tensor]) -> float:
        return bench.seconds([lambda each=each: attend(*each) for each in caches])

    with bench.memory():
        seconds = timed(ours)
    anchors: dict[str, float | None] = {}
    rivals = {} if case.num_splits else {"masked": masked, "live": live}
    for name, attend in rivals.items():
        anchors[name] = within_memory(lambda attend=attend: timed(attend))
    bench.record(
        "decode",
        **vars(case),
        ours=seconds,
        share=case.num_bytes / seconds / bench.copy_bandwidth,
        **anchors,
    )


def within_memory(measure: Callable[[], float]) -> float | None:
    """What was measured; None where PyTorch's way needs more memory than the GPU has."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()  # pieces that the next ones can't use
        return None
