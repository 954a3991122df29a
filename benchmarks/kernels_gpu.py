"""The CUDA kernels on one GPU: right, and how near to what its memory allows. Under 10 minutes.

    python -m benchmarks.kernels_gpu [--phases correct time] [--budget 540] [--output DIRECTORY]
    python -m benchmarks.kernels_gpu --backend emulator     # the same course, tiny, without a GPU
    python -m benchmarks.kernels_gpu --tiny                 # tiny on a GPU: tries the course itself

Phases, each of which leaves off what its share of the budget has no room for and says so:
`compile` builds each specialisation and counts registers and spills; `correct` runs the operators'
cases at their sizes; `ceilings` measures a copy and a matrix product; `adam` and `decode` time the
kernels by replays of CUDA graphs over more buffers than the cache holds, beside what PyTorch has
for the same work, and `small` the cache and the sampler; `loop` generates with a model of random
weights. Lines of JSON are written as they come, tables and gates at the end; a gate or a phase that
fails, or that time was over for, is exit code 1.

Under NVIDIA's checker: compute-sanitizer --tool memcheck python -m benchmarks.kernels_gpu
--phases correct --cases 12 (likewise racecheck and synccheck), with
PYTORCH_NO_CUDA_MEMORY_CACHING=1.
"""

import argparse
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_gates import report
from benchmarks.kernels_gpu_bench import Bench
from benchmarks.kernels_gpu_decode import Decoding, run_decode
from benchmarks.kernels_gpu_small import run_small
from benchmarks.revision import revision
from pipeline.kernels.adamw import cuda as adamw
from pipeline.kernels.adamw.definition import AdamW, Weights
from pipeline.kernels.decode_attention import cases as attention_cases
from pipeline.kernels.emulator.emulated import Emulator
from pipeline.kernels.operators import cases_of, operators
from pipeline.kernels.toolchain.gpu import HEADERS, OPERATORS, OPTIONS, gpu_of
from pipeline.kernels.toolchain.nvrtc import Nvrtc, find_nvrtc

SHARES = {
    "compile": 60,
    "correct": 120,
    "ceilings": 20,
    "adam": 80,
    "decode": 150,
    "small": 30,
    "loop": 80,
}
"""Phases, and the parts of the budget that they may take."""

TIMED = {"adam", "decode", "small", "loop"}
"""Phases that are compared with what a copy reaches."""

LENGTHS = (64, 256)
"""New tokens of the phase `loop`."""

FEW = (4, 8)
"""Of a tiny one."""

Phase = Callable[[Bench, argparse.Namespace], None]

STEP = AdamW(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=10, multiplier=0.5)


def run_compile(bench: Bench, _: argparse.Namespace) -> None:
    """Every specialisation for this GPU: registers, spills and seconds."""
    sources = [
        (name, defines)
        for name in operators(on_gpu=True)
        for defines in cases_of(name).SPECIALISATIONS
    ]
    for name, defines in bench.in_time("compile", sources[-2:] if bench.tiny else sources):
        options = [f"--gpu-architecture={bench.gpu.architecture}", *OPTIONS]
        options += [f"-D{macro}={value}" for macro, value in defines.items()]
        start = time.perf_counter()
        _, log = bench.nvrtc.compile(
            (OPERATORS / name / "cuda.cu").read_text(),
            name=f"{name}.cu",
            headers=HEADERS,
            options=[*options, "--ptxas-options=-v"],
        )
        spills = [int(number) for number in re.findall(r"(\d+) bytes spill", log)]
        bench.record(
            "compile",
            kernel=name,
            defines=dict(defines),
            seconds=time.perf_counter() - start,
            registers=[int(number) for number in re.findall(r"Used (\d+) registers", log)],
            spilled=sum(spills) if spills else None,  # None: the compiler did not say
        )


def run_correct(bench: Bench, args: argparse.Namespace) -> None:
    """The operators' cases: against float64, or the bits of the definition."""
    for name, few in {"adamw": 1, "cache_append": 4, "sampling": 2}.items():
        cases = cases_of(name)
        for case in bench.in_time("correct", cases.QUICK[:few] if bench.tiny else cases.GRID):
            inputs = [cases.inputs_of(case, bench.gpu.device) for _ in range(2)]
            with bench.memory():
                out = cases.run(case, inputs[0], bench.gpu)
            right = cases.is_right(case, inputs[1], out)
            bench.record("correct", operator=f"{name} {case}", right=right)
    cases = attention_cases.GRID[:: max(1, len(attention_cases.GRID) // args.cases)]
    for case in bench.in_time("correct", cases[: args.cases]):
        inputs = attention_cases.inputs_of(case, bench.gpu.device)
        with bench.memory():
            first, again = (attention_cases.run(case, inputs, bench.gpu) for _ in range(2))
        bench.record(
            "correct",
            case=str(case),
            error=attention_cases.relative_error(inputs, first),
            tolerance=attention_cases.TOLERANCES[case.dtype],
            same_again=torch.equal(first, again),
        )


def run_ceilings(bench: Bench, _: argparse.Namespace) -> None:
    """What a copy and a bf16 matrix product reach."""
    device = bench.gpu.device
    source = torch.ones(1 << (12 if bench.tiny else 32), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = bench.seconds([lambda: target.copy_(source)])
    bench.copy_bandwidth = 2 * source.nbytes / seconds
    size = 32 if bench.tiny else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = bench.seconds([lambda: left @ right])
    bench.record("ceilings", copy=bench.copy_bandwidth, matrix_product=2 * size**3 / product)


def run_adam(bench: Bench, _: argparse.Namespace) -> None:
    """fp32 moments, few large vectors and many small: fp32 masters, and the engine's split ones."""
    layouts = {"24 of 55 million": [55_000_000] * 24, "300 of 4 million": [4_000_000] * 300}
    if bench.tiny:
        layouts = {"3 of 40": [40] * 3}
    cases = [(name, split) for split in (False, True) for name in layouts]
    for name, split in bench.in_time("adam", cases):
        ours = _time_adam(bench, [_shard(size, bench.gpu.device, split) for size in layouts[name]])
        gradient = torch.float32 if split else torch.bfloat16
        plain = [_shard(size, bench.gpu.device, False, gradient) for size in layouts[name]]
        bench.record(
            "adam",
            vectors=f"{name}, {'split masters' if split else 'masters and copies'}",
            ours=ours,
            pytorch=bench.seconds([_step_of_pytorch(plain)]),
            floor=28 * sum(layouts[name]) / bench.copy_bandwidth,  # in both
        )


def _time_adam(bench: Bench, shards: Sequence[adamw.Shard]) -> float:
    with bench.memory():
        table = adamw.ShardTable(shards, bench.gpu)
        scalars = adamw.scalars_of(STEP, bench.gpu.device)
        return bench.seconds([lambda: adamw.adamw_(table, scalars, betas=STEP.betas, eps=STEP.eps)])


def _shard(
    size: int,
    device: torch.device,
    split: bool,  # noqa: FBT001
    gradient: torch.dtype = torch.bfloat16,
) -> adamw.Shard:
    """fp32 master, bf16 copy and a gradient; or, split, bf16 master and 16 bits, fp32 gradient."""

    def vector(dtype: torch.dtype) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    weights = Weights(
        master=vector(torch.bfloat16 if split else torch.float32),
        exp_avg=vector(torch.float32),
        exp_avg_sq=vector(torch.float32).square_(),
        copy=None if split else vector(torch.bfloat16),
        low_bits=torch.zeros(size, device=device, dtype=torch.int16) if split else None,
    )
    return adamw.Shard(
        weights=weights,
        gradient=vector(torch.float32 if split else gradient),
        lr=1.0,
        weight_decay=STEP.weight_decay,
    )


def _step_of_pytorch(shards: Sequence[adamw.Shard]) -> Callable[[], None]:
    """Cast, clip, fused AdamW, cast."""
    masters = [shard.weights.master for shard in shards]
    copies = [shard.weights.copy for shard in shards if shard.weights.copy is not None]
    steps = [torch.tensor(9.0, device=masters[0].device) for _ in shards]

    def step() -> None:
        gradients = [shard.gradient.to(torch.float32, copy=True) for shard in shards]
        torch._foreach_mul_(gradients, STEP.multiplier)
        torch._fused_adamw_(
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
        torch._foreach_copy_(copies, masters)

    return step


def run_loop(bench: Bench, args: argparse.Namespace) -> None:
    """A token after prompts of 256, batch 64: with the kernel, without, and transformers.

    Seconds of many tokens less those of few: prompts and the capture of a graph are in both.
    """
    del args
    from transformers import OPTConfig, OPTForCausalLM

    tiny, on_gpu = bench.tiny, bench.gpu.device.type == "cuda"
    width = 128 if tiny and on_gpu else 2048
    config = OPTConfig(
        vocab_size=50_272,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_hidden_layers=2 if tiny and on_gpu else 24,
        num_attention_heads=width // 64,
        max_position_embeddings=2048,
    )
    with torch.device(bench.gpu.device if on_gpu else "meta"):
        model = OPTForCausalLM(config).to(torch.bfloat16).eval()
    lengths, num_prompts = (FEW, 2) if tiny else (LENGTHS, 64)
    weights = sum(param.nbytes for param in model.parameters())
    length = 256 + sum(LENGTHS) // 2  # of a sequence, at the tokens that make the difference
    keys = Decoding("OPT-1.3B", 64, length).num_bytes * config.num_hidden_layers
    floor = (weights + keys) / bench.copy_bandwidth
    if not on_gpu:
        bench.record("loop", floor=floor, not_run="a model under the emulator takes minutes")
        return
    for system in bench.in_time("loop", ["kernel", "PyTorch", "transformers"]):
        for new_tokens in lengths:  # what is compiled, loaded and captured once
            _generate(model, system, num_prompts=num_prompts, new_tokens=new_tokens)
        few, many = (
            _seconds_to_generate(model, system, num_prompts=num_prompts, new_tokens=new_tokens)
            for new_tokens in lengths
        )
        bench.record(
            "loop",
            system=system,
            seconds_per_token=(many - few) / (lengths[1] - lengths[0]),
            floor=floor,
        )


def _seconds_to_generate(model: Any, system: str, **sizes: int) -> float:  # noqa: ANN401
    torch.cuda.synchronize()
    start = time.perf_counter()
    _generate(model, system, **sizes)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _generate(model: Any, system: str, *, num_prompts: int, new_tokens: int) -> None:  # noqa: ANN401
    from inference.generation import generate
    from pipeline.kernels.choice import SWITCH
    from pipeline.models.attention import RAGGED

    ids = torch.randint(4, 50_000, (num_prompts, 256), device=model.device)
    if system == "transformers":
        model.set_attn_implementation("sdpa")
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        return
    os.environ[SWITCH] = "off" if system == "PyTorch" else "auto"
    model.set_attn_implementation(RAGGED)
    generate(
        model,
        ids.tolist(),
        max_new_tokens=new_tokens,
        temperature=0.0,
        stop_ids=[],
        seed=0,
        batch_size=64,
    )


def environment(bench: Bench, args: argparse.Namespace) -> dict[str, object]:
    """Card, commit and versions."""
    card = "emulator" if args.backend == "emulator" else torch.cuda.get_device_name()
    return {
        "card": card,
        "commit": revision(),
        "torch": torch.__version__,
        "nvrtc": bench.nvrtc.path,
        "phases": args.phases,
    }


def main(argv: Sequence[str]) -> int:
    """Read the options, run the phases, tell what they found."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["cuda", "emulator"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, and no gates of speed")
    parser.add_argument("--phases", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--budget", type=float, default=540, help="seconds for all phases")
    parser.add_argument("--cases", type=int, default=204, help="of the phase correct")
    parser.add_argument("--output", type=Path, default=Path("output/kernels_gpu"))
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "results.jsonl").write_text("")
    if args.backend == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device was found; --backend emulator tries the script itself")
    with tempfile.TemporaryDirectory() as scratch:
        bench = make_bench(args, Path(scratch))
        bench.record("environment", **environment(bench, args))
        # What later phases are compared with comes first of all that is timed.
        run: dict[str, Phase] = {
            "compile": run_compile,
            "correct": run_correct,
            "ceilings": run_ceilings,
        }
        run |= {"adam": run_adam, "decode": run_decode, "small": run_small, "loop": run_loop}
        try:
            for phase, seconds in SHARES.items():
                if phase in args.phases or (
                    phase == "ceilings" and not TIMED.isdisjoint(args.phases)
                ):
                    share = seconds / sum(SHARES.values())
                    bench.deadline = time.monotonic() + args.budget * share
                    _attempt(run[phase], bench, args, phase)
        finally:  # interrupted as well
            holds = report(bench.rows, timed=not bench.tiny)
        return 0 if holds else 1


def _attempt(run: Phase, bench: Bench, args: argparse.Namespace, phase: str) -> None:
    """Run a phase; a failure is a row, which fails a gate, and leaves the others their results."""
    try:
        run(bench, args)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        bench.record(phase, failed=f"{type(error).__name__}: {error}")


def make_bench(args: argparse.Namespace, scratch: Path) -> Bench:
    """With the GPU there is, or the emulated one."""
    if args.backend == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        return Bench(gpu_of(device), find_nvrtc(), tiny=args.tiny, output=args.output)
    emulator = Emulator(scratch)
    return Bench(
        emulator.gpu(),
        Nvrtc(emulator.library),
        tiny=True,
        output=args.output,
        memory=emulator.any_memory,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
