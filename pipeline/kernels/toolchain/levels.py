"""Which instructions of a processor the kernels are written for, and which are in use here.

As many as PyTorch uses, so that its variables hold both to fewer: `ATEN_CPU_CAPABILITY=avx2` with
`ONEDNN_MAX_CPU_ISA=AVX2`, or the latter alone, as AVX512_CORE, which takes bf16 away.
"""

import os
import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Level:
    """A set of instructions, with what the compiler must be told to use them."""

    name: str
    vectors: str
    bf16: str
    """How products of bf16 are computed."""

    flags: tuple[str, ...] = ()


WIDENED = "made fp32 in the cache"
AVX2 = Level("AVX2", "256 bits", WIDENED, ("-mavx2", "-mfma"))
AVX512 = Level(
    "AVX-512",
    "512 bits",
    WIDENED,
    (
        *AVX2.flags,
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    ),
)
AVX512_BF16 = Level("AVX-512 with bf16", "512 bits", "instructions for pairs", AVX512.flags)
NEON = Level("NEON", "2 x 128 bits", WIDENED)
NEON_BF16 = Level("NEON with bf16", "2 x 128 bits", "PyTorch's, of whole sequences")
LEVELS = (NEON, NEON_BF16, AVX2, AVX512, AVX512_BF16)

OF_PYTORCH = {"AVX2": AVX2, "AVX512": AVX512}
"""By PyTorch's name of what an x86 processor has. Not -march=native: machines may share a cache."""

OF_ONEDNN = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that hold the library below PyTorch's products to fewer instructions."""

WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Their values that take products of bf16 away."""


def level() -> Level | None:
    """What is in use on this machine; None where the kernels are not written for its processor."""
    if is_arm():
        return NEON_BF16 if has_bf16_products() else NEON
    found = OF_PYTORCH.get(torch.backends.cpu.get_cpu_capability())
    return AVX512_BF16 if found is AVX512 and multiplies_bf16() else found


def has_avx512() -> bool:
    """Whether PyTorch uses vectors of 512 bits here."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def multiplies_bf16() -> bool:
    """Whether an x86 processor has instructions for it, and PyTorch's libraries may use them."""
    if any(os.environ.get(each, "").upper() in WITHOUT_BF16 for each in OF_ONEDNN):
        return False
    # PyTorch doesn't promise its question; unasked the answer is no.
    return getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def has_bf16_products() -> bool:
    """Whether PyTorch multiplies bf16 on this processor at least as fast as fp32."""
    if is_arm():
        return bool(getattr(torch.cpu, "get_capabilities", dict)().get("bf16", False))
    return has_avx512() and multiplies_bf16()


def is_arm() -> bool:
    """Whether the processor is one of ARM's with 64 bits."""
    return platform.machine() in ("aarch64", "arm64")


def bf16_flags() -> tuple[str, ...]:
    """What products of bf16 numbers gain from, and the compiler may use on this machine."""
    return ("-mavx512bf16",) if level() is AVX512_BF16 else ()


def table() -> list[str]:
    """All levels, and which is in use, as lines of Markdown."""
    used = level()
    rows = [
        f"| {each.name} | {each.vectors} | {each.bf16} | {'in use' if each is used else ''} |"
        for each in LEVELS
    ]
    return ["| instructions | vectors | products of bf16 | here |", "|---|---|---|---|", *rows]
