"""`python -m pipeline.kernels`: the kernels that this machine builds, and why it lacks others."""

from collections.abc import Iterator, Sequence

import torch

from pipeline.cli import run_main, say
from pipeline.kernels import choice
from pipeline.kernels.adamw import cuda as adamw_cuda
from pipeline.kernels.adamw import dispatch as adamw
from pipeline.kernels.build import Built, bf16_flags, cache_directory
from pipeline.kernels.cache_append import cuda as append_cuda
from pipeline.kernels.decode_attention import cpu as attention_cpu
from pipeline.kernels.decode_attention import cuda as attention_cuda
from pipeline.kernels.linear import dispatch as linear
from pipeline.kernels.sampling import cpu as sampling_cpu
from pipeline.kernels.sampling import cuda as sampling_cuda

F32, BF16 = torch.float32, torch.bfloat16


def on_cpu() -> Iterator[tuple[str, object]]:
    """The kernels of the CPU, built."""
    for dtype, name in ((F32, "fp32"), (BF16, "bf16")):
        yield f"AdamW, {name}", adamw.find(torch.device("cpu"), copy=None, split=dtype == BF16)
        yield f"decode attention, {name}", attention_cpu.library(dtype)
        yield f"linear, {name}", linear.library(dtype)
    yield "sampling", sampling_cpu.library()
    yield "top-k and top-p", sampling_cpu.cut_library()


def on_gpu(device: torch.device) -> Iterator[tuple[str, choice.Gpu | str]]:
    """The kernels of a GPU, built and tested."""
    shape = attention_cuda.Shape(1, 64, 2)
    for name, defines, self_test in (
        ("adamw", adamw_cuda.specialisation((F32, F32, None, True)), adamw_cuda.self_test),
        ("cache_append", append_cuda.SPECIALISATION, append_cuda.self_test),
        ("decode_attention", attention_cuda.specialisation(BF16, shape), attention_cuda.self_test),
        ("sampling", sampling_cuda.specialisation(F32), sampling_cuda.self_test),
    ):
        yield name, choice.find(device, name, defines, self_test)


def main(argv: Sequence[str]) -> None:
    """Build the kernels and print a table."""
    del argv
    rows = ["| kernel | on this machine |", "|---|---|"]
    for name, found in on_cpu():
        state = f"PyTorch instead: {found}"
        if isinstance(found, Built):
            state = "kept" if found.seconds is None else f"built in {found.seconds:.1f} s"
        rows.append(f"| {name}, CPU | {state} |")
    if torch.cuda.is_available():
        for name, found in on_gpu(torch.device("cuda", torch.cuda.current_device())):
            state = f"PyTorch instead: {found}" if isinstance(found, str) else "built"
            rows.append(f"| {name}, GPU | {state} |")
    say(f"{torch.get_num_threads()} threads; kernels are kept in {cache_directory()}")
    say(
        f"instructions of the processor: {torch.backends.cpu.get_cpu_capability()}"
        + (" with bf16" if bf16_flags() else "")
        + "\n"
    )
    say("\n".join(rows))


if __name__ == "__main__":
    run_main(main)
