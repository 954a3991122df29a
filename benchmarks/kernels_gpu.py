"""The CUDA kernels against PyTorch and the memory bandwidth of the GPU. Takes minutes.

    python -m benchmarks.kernels_gpu [--output DIRECTORY] [--tiny]

AdamW over 1.3B parameters against PyTorch's fused AdamW with casts, and decode attention against
scaled_dot_product_attention on the live keys, by replays of CUDA graphs over more memory than the
cache holds. `tests/pipeline/kernels/test_device.py` tests that the kernels are right.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.adamw import AdamW, Shard, ShardTable, Weights, step_scalars
from pipeline.kernels.decode_attention import Scores, launch
from pipeline.kernels.gpu import Gpu, gpu_of

REPEATS = 20
BEYOND_CACHE = 256 << 20
"""Bytes of keys and values that timed calls read: several times the cache of an H200."""

HEADS = {
    "OPT-1.3B": (32, 32, 64),
    "Llama-7B": (32, 32, 128),
    "Llama-3-8B": (32, 8, 128),
    "Llama-3-70B, an eighth": (8, 1, 128),
}
"""Query heads, key heads, head size."""

STEP = AdamW(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10, multiplier=0.5)

Row = dict[str, object]

_foreach_mul_, _foreach_copy_, _fused_adamw_ = (
    getattr(torch, name) for name in ("_foreach_mul_", "_foreach_copy_", "_fused_adamw_")
)


def median_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds per call; the calls differ only in the memory they use."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def copy_bandwidth(device: torch.device, *, tiny: bool) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones(1 << (20 if tiny else 32), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds([lambda: target.copy_(source)])


def time_adamw(gpu: Gpu, bandwidth: float, *, tiny: bool) -> Iterator[Row]:
    """fp32 masters with bf16 copies, and the engine's split masters."""
    sizes = [1000] * 3 if tiny else [55_000_000] * 24
    for split in (False, True):
        shards = [_shard(size, gpu.device, split=split) for size in sizes]
        table, scalars = ShardTable(shards, gpu), step_scalars(STEP, gpu.device)
        step = partial(table.step, scalars, STEP)
        ours = median_seconds([step])
        shards = [_shard(size, gpu.device, split=False) for size in sizes]
        yield {
            "adamw": "split masters" if split else "masters and copies",
            "ours": ours,
            "pytorch": median_seconds([_step_of_pytorch(shards)]),
            "floor": 28 * sum(sizes) / bandwidth,
        }


def _shard(size: int, device: torch.device, *, split: bool) -> Shard:
    def vector(dtype: torch.dtype) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    weights = Weights(
        master=vector(torch.bfloat16 if split else torch.float32),
        exp_avg=vector(torch.float32),
        exp_avg_sq=vector(torch.float32).square_(),
        copy=None if split else vector(torch.bfloat16),
        low_bits=torch.zeros(size, device=device, dtype=torch.int16) if split else None,
    )
    gradient = vector(torch.float32 if split else torch.bfloat16)
    return Shard(weights=weights, gradient=gradient, lr=1.0, weight_decay=STEP.weight_decay)


def _step_of_pytorch(shards: Sequence[Shard]) -> Callable[[], None]:
    """Cast, clip, fused AdamW, cast."""
    masters = [shard.weights.master for shard in shards]
    copies = [shard.weights.copy for shard in shards if shard.weights.copy is not None]
    steps = [torch.tensor(9.0, device=masters[0].device) for _ in shards]

    def step() -> None:
        gradients = [shard.gradient.to(torch.float32, copy=True) for shard in shards]
        _foreach_mul_(gradients, STEP.multiplier)
        _fused_adamw_(
            masters,
            gradients,
            [shard.weights.exp_avg for shard in shards],
            [shard.weights.exp_avg_sq for shard in shards],
            [],
            steps,
            lr=STEP.lr,
            beta1=STEP.betas[0],
            beta2=STEP.betas[1],
            weight_decay=STEP.weight_decay,
            eps=STEP.eps,
            amsgrad=False,
            maximize=False,
        )
        _foreach_copy_(copies, masters)

    return step


def time_attention(gpu: Gpu, bandwidth: float, *, tiny: bool) -> Iterator[Row]:
    """One new token for each sequence, in bf16, with equal sequence lengths."""
    shapes = [(1, 20)] if tiny else [(64, 512), (16, 2048), (1, 2048), (64, 2048), (16, 8192)]
    for batch, length in shapes:
        for model, (heads, kv_heads, size) in HEADS.items():
            num_bytes = 4 * batch * length * kv_heads * size
            shape = (batch, kv_heads, length + 32, size)  # a slot is wider than its sequence
            caches = [
                [torch.randn(shape, device=gpu.device, dtype=torch.bfloat16) for _ in range(2)]
                for _ in range(1 if tiny else -(-BEYOND_CACHE // num_bytes))
            ]
            query = torch.randn(batch, heads, size, device=gpu.device, dtype=torch.bfloat16)
            lengths = torch.full((batch,), length, dtype=torch.int32, device=gpu.device)
            scores = Scores(lengths=lengths, scaling=size**-0.5)

            ours = [partial(_attend, query, *cache, scores, gpu, length) for cache in caches]
            live = [
                partial(
                    F.scaled_dot_product_attention,
                    query[:, :, None],
                    *(each[:, :, :length] for each in cache),
                    enable_gqa=True,
                )
                for cache in caches
            ]
            yield {
                "attention": f"{model}, {batch} x {length}",
                "ours": median_seconds(ours),
                "pytorch": median_seconds(live),
                "floor": num_bytes / bandwidth,
            }


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, gpu: Gpu, longest: int
) -> Tensor:
    return launch(query, key, value, scores, gpu=gpu, longest=longest)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("output/kernels_gpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    args = parser.parse_args(argv)
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    bandwidth = copy_bandwidth(gpu.device, tiny=args.tiny)
    rows: list[Row] = [{"card": torch.cuda.get_device_name(), "copy": bandwidth}]
    for measure in (time_adamw, time_attention):
        for row in measure(gpu, bandwidth, tiny=args.tiny):
            print(json.dumps(row), flush=True)
            rows.append(row)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
