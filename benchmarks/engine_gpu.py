"""The engine on one GPU: overlap of its copies, and its overhead over plain PyTorch.

    bash scripts/measure_gpu.sh [--output DIRECTORY]
    bash scripts/measure_gpu.sh --tiny --device cpu     # the same course with a toy, anywhere

Two parts, each in separate processes; weights are random, nothing is downloaded. `overlap` traces
forward and backward passes of OPT-1.3B at stage 3 with its weights on the host, and shows during
how much of the time of parameter copies other kernels were running.
`overhead` trains OPT-1.3B in bf16 with fp32 masters, clipping and fused AdamW: a plain loop against
stages 0 to 3.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Intervals = list[tuple[float, float]]
"""Start and end of each; they may overlap each other."""

PARTS = ("overlap", "overhead")
SYSTEMS = ("plain", "stage 0", "stage 1", "stage 2", "stage 3")
WARM_UP = 3
"""Steps before the clock or the profiler starts."""

COMPUTE_OPERATORS = {"aten::mm", "aten::addmm", "aten::bmm"}
"""On a CPU, where no kernels are traced."""


def merged(intervals: Intervals) -> Intervals:
    """The same moments as spans that are disjoint and in order."""
    spans: Intervals = []
    for start, end in sorted(intervals):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((start, end))
    return spans


def total(intervals: Intervals) -> float:
    """Length of the moments that lie in any of the spans."""
    return sum(end - start for start, end in merged(intervals))


def covered(intervals: Intervals, by: Intervals) -> float:
    """Length of the moments that lie in both."""
    return total(intervals) + total(by) - total([*intervals, *by])


def build_model(args: argparse.Namespace) -> Any:  # noqa: ANN401
    """OPT-1.3B with random bf16 weights, without dropout; or one of two narrow layers."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    width = 64 if args.tiny else 2048
    config = OPTConfig(
        vocab_size=512 if args.tiny else 50_272,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_hidden_layers=2 if args.tiny else 24,
        num_attention_heads=width // 64,
        max_position_embeddings=2048,
        dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        return OPTForCausalLM(config).to(torch.bfloat16).train()


def settings(stage: int, **offload: Any) -> Any:  # noqa: ANN401
    """Settings of the engine."""
    from pipeline.config import OptimConfig, TrainedModelConfig
    from pipeline.config.model import OffloadConfig, ZeroConfig

    return TrainedModelConfig(
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        zero=ZeroConfig(offload=OffloadConfig(**offload)),
        optim=OptimConfig(schedule="constant", warmup_ratio=0.0),
    )


def loss_of(model: Callable[..., Any], ids: Any) -> Any:  # noqa: ANN401
    """Mean loss of the next tokens."""
    from torch.nn import functional as F

    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten())


def random_ids(args: argparse.Namespace) -> Any:  # noqa: ANN401
    """One micro-batch."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (2, 32) if args.tiny else (args.micro_batch, args.sequence)
    return torch.randint(0, 512, shape, generator=generator).to(args.device)


def wait(device: str) -> None:
    """Until the device has done what its queue holds."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


# What runs in processes of its own


def plain_loop(model: Any) -> Callable[[Any], None]:  # noqa: ANN401
    """The step of a plain loop: bf16 weights and gradients, fp32 masters and moments."""
    import torch
    from torch import nn

    from pipeline.config import OptimConfig

    optim = OptimConfig()
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(
        masters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0, fused=True
    )
    assert optim.max_grad_norm is not None
    max_norm = optim.max_grad_norm

    def step(ids: Any) -> None:  # noqa: ANN401
        loss_of(model, ids).backward()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def engine_step(model: Any, config: Any) -> Callable[[Any], None]:  # noqa: ANN401
    """The engine's step on the same micro-batch."""
    from pipeline.engine.engine import Engine

    engine = Engine(model, config, total_steps=1000)

    def step(ids: Any) -> None:  # noqa: ANN401
        engine.backward(loss_of(engine, ids))
        engine.step()

    return step


def time_system(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step, and the most memory that PyTorch held."""
    import torch

    model = build_model(args)
    system, ids = args.system, random_ids(args)
    step = plain_loop(model) if system == "plain" else engine_step(model, settings(int(system[-1])))
    for _ in range(WARM_UP):
        step(ids)
    wait(args.device)
    seconds: list[float] = []
    for _ in range(args.steps):
        start = time.perf_counter()
        step(ids)
        wait(args.device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    return {"seconds": statistics.median(seconds), "peak_bytes": peak}


def trace_overlap(args: argparse.Namespace) -> dict[str, float]:
    """Trace one forward and backward pass at stage 3, with the weights where `system` says."""
    import torch

    from pipeline.engine.engine import Engine

    engine = Engine(build_model(args), settings(3, params=args.system), total_steps=1000)
    ids = random_ids(args)

    def passes() -> None:
        engine.backward(loss_of(engine, ids))
        wait(args.device)

    for _ in range(WARM_UP):
        passes()
        engine.discard()
    seconds: list[float] = []
    for _ in range(args.steps):
        start = time.perf_counter()
        passes()
        seconds.append(time.perf_counter() - start)
        engine.discard()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if args.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        passes()
    trace = args.output / f"trace-params-{args.system}.json"
    profile.export_chrome_trace(str(trace))
    copies, compute = read_trace(trace, on_gpu=args.device == "cuda")
    return {
        "seconds": statistics.median(seconds),
        "copy_seconds": total(copies) / 1e6,
        "compute_seconds": total(compute) / 1e6,
        "overlap": covered(copies, compute) / total(copies) if copies else 0.0,
    }


def read_trace(path: Path, *, on_gpu: bool) -> tuple[Intervals, Intervals]:
    """When weights were under way - copies from the host, NCCL - and when kernels computed, in µs.

    On a CPU: copies of tensors, and matrix products.
    """
    copies: Intervals = []
    compute: Intervals = []
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") != "X":
            continue
        kind, name = event.get("cat", ""), event["name"]
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if on_gpu:
            is_nccl = "nccl" in name.lower()
            if (kind == "gpu_memcpy" and "HtoD" in name) or (kind == "kernel" and is_nccl):
                copies.append(span)
            elif kind == "kernel":
                compute.append(span)
        elif kind == "cpu_op":
            if name == "aten::copy_":
                copies.append(span)
            elif name in COMPUTE_OPERATORS:
                compute.append(span)
    return copies, compute


# What starts them


def child(args: argparse.Namespace, part: str, system: str) -> dict[str, float]:
    """Run one system of a part in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine_gpu", "--inside", part]
    command += ["--system", system, "--device", args.device, "--steps", str(args.steps)]
    command += ["--micro-batch", str(args.micro_batch), "--sequence", str(args.sequence)]
    command += ["--output", str(args.output), *(["--tiny"] if args.tiny else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(args.device)
    )
    if done.returncode != 0:
        print(f"{part}, {system} failed:\n{done.stderr}", flush=True)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def environment(device: str) -> dict[str, str]:
    """With the GPU hidden where the device is the CPU."""
    return dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def run_overlap(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Stage 3 with its weights on the device and on the host."""
    figures = {place: child(args, "overlap", place) for place in ("none", "cpu")}
    print("\n## Overlap of parameter copies with compute, stage 3, forward and backward\n")
    print("| offload.params | passes, ms | copies, ms | compute, ms | copies under compute |")
    print("|---|---|---|---|---|")
    for place, each in figures.items():
        if each:
            times = (each[key] * 1e3 for key in ("seconds", "copy_seconds", "compute_seconds"))
            row = [place, *(f"{value:,.1f}" for value in times), f"{each['overlap']:.0%}"]
            print(f"| {' | '.join(row)} |")
    if args.device == "cpu":
        print("\nA CPU has no copy engine: nothing overlaps there.")
    print(f"\nTraces: {args.output}/trace-params-*.json", flush=True)
    return figures


def run_overhead(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Alternate the systems; the overhead is taken within each round."""
    rounds: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for _ in range(args.rounds):
        for system, figures in rounds.items():
            figures.append(child(args, "overhead", system))
    print("\n## Step time against a plain loop with the same masters\n")
    print("| system | ms a step | overhead | range | GiB at the peak |")
    print("|---|---|---|---|---|")
    for system, figures in rounds.items():
        if not all(figures) or not all(rounds["plain"]):
            continue
        over = [
            100 * (ours["seconds"] / plain["seconds"] - 1)
            for ours, plain in zip(figures, rounds["plain"], strict=True)
        ]
        step = 1e3 * statistics.median(each["seconds"] for each in figures)
        peak = max(each["peak_bytes"] for each in figures) / 2**30
        print(
            f"| {system} | {step:,.1f} | {statistics.median(over):+.1f} % |"
            f" {min(over):+.1f} to {max(over):+.1f} % | {peak:.1f} |",
            flush=True,
        )
    return rounds


def main(argv: Sequence[str]) -> None:
    """Read the options, run the parts, write what they found."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy model and fewer tests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--output", type=Path, default=Path("output/gpu"))
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--system", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.inside:
        measure = {"overlap": trace_overlap, "overhead": time_system}[args.inside]
        print(json.dumps(measure(args)))
        return
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device was found; --tiny --device cpu tries the script itself")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    run = {"overlap": run_overlap, "overhead": run_overhead}
    results = {part: run[part](args) for part in args.parts}
    report = {"device": name, "torch": torch.__version__, **results}
    (args.output / "results.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
