"""The engine on one GPU: its overhead over plain PyTorch.

    bash scripts/measure_gpu.sh [--output DIRECTORY]
    bash scripts/measure_gpu.sh --tiny --device cpu     # the same with a tiny model, anywhere

Trains OPT-1.3B with random weights in bf16, with fp32 masters, clipping and fused AdamW: a plain
loop against stages 0 to 3 and offload, each in a separate process. Nothing is downloaded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SYSTEMS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "stage 3, parameters on the host": (3, {"params": "cpu"}),
    "stage 2, gradients on the host": (2, {"gradients": "cpu"}),
    "stage 2, optimizer on the host": (2, {"optimizer": "cpu"}),
}
"""ZeRO stage and offload; in addition to `plain`, the loop without the engine."""

WARM_UP = 3
"""Steps before timing starts."""


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


def compute_loss(model: Callable[..., Any], ids: Any) -> Any:  # noqa: ANN401
    """Mean next-token loss."""
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
    """Synchronize with the device."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


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
        compute_loss(model, ids).backward()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        nn.utils.clip_grad_norm_(masters, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def engine_step(model: Any, system: str) -> Callable[[Any], None]:  # noqa: ANN401
    """The engine's step on the same micro-batch."""
    from pipeline.config import OptimConfig, TrainedModelConfig
    from pipeline.config.model import OffloadConfig, ZeroConfig
    from pipeline.engine.engine import Engine

    stage, offload = SYSTEMS[system]
    config = TrainedModelConfig(
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        zero=ZeroConfig(offload=OffloadConfig(**offload)),
        optim=OptimConfig(schedule="constant", warmup_ratio=0.0),
    )
    engine = Engine(model, config, total_steps=1000)

    def step(ids: Any) -> None:  # noqa: ANN401
        engine.backward(compute_loss(engine, ids))
        engine.step()

    return step


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Median seconds per step, and peak memory reserved by PyTorch."""
    import torch

    model, ids = build_model(args), random_ids(args)
    step = plain_loop(model) if args.system == "plain" else engine_step(model, args.system)
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


def run(args: argparse.Namespace, system: str) -> dict[str, float]:
    """Measure one system in a separate process."""
    command = [sys.executable, "-m", "benchmarks.engine_gpu", "--system", system]
    command += ["--device", args.device, "--steps", str(args.steps)]
    command += ["--micro-batch", str(args.micro_batch), "--sequence", str(args.sequence)]
    command += ["--tiny"] if args.tiny else []
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **hidden}
    )
    if done.returncode != 0:
        print(f"{system} failed:\n{done.stderr}", flush=True)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Alternate the systems; overhead is computed within each round."""
    rounds: dict[str, list[dict[str, float]]] = {system: [] for system in ("plain", *args.systems)}
    for _ in range(args.rounds):
        for system, figures in rounds.items():
            figures.append(run(args, system))
    print("| system | ms a step | overhead | range | GiB at the peak |")
    print("|---|---|---|---|---|")
    for system, figures in rounds.items():
        if not all(figures) or not all(rounds["plain"]):
            continue
        over = [
            100 * (ours["seconds"] / plain["seconds"] - 1)
            for ours, plain in zip(figures, rounds["plain"], strict=True)
        ]
        step = 1e3 * statistics.median(row["seconds"] for row in figures)
        peak = max(row["peak_bytes"] for row in figures) / 2**30
        print(
            f"| {system} | {step:,.1f} | {statistics.median(over):+.1f} % |"
            f" {min(over):+.1f} to {max(over):+.1f} % | {peak:.1f} |",
            flush=True,
        )
    return rounds


def main(argv: Sequence[str]) -> None:
    """Parse the options, measure, print the table and write it."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--output", type=Path, default=Path("output/gpu"))
    parser.add_argument("--system", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.system:
        print(json.dumps(measure(args)))
        return
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device was found; --tiny --device cpu tries the script itself")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    report = {"device": name, "torch": torch.__version__, "rounds": compare(args)}
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
