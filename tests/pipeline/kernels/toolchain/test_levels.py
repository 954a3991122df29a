"""Which instructions are in use, by what PyTorch says of the processor and may use."""

import pytest
import torch

from pipeline.kernels.toolchain import levels
from pipeline.kernels.toolchain.levels import AVX2, AVX512, AVX512_BF16, NEON, NEON_BF16, Level


def machine(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: str, *, bf16: bool
) -> pytest.MonkeyPatch:
    """A processor as PyTorch tells of it."""
    for variable in levels.OF_ONEDNN:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(levels.platform, "machine", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": bf16}, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "capability", "bf16", "expected"),
    [
        ("x86_64", "DEFAULT", False, None),
        ("x86_64", "AVX2", True, AVX2),
        ("x86_64", "AVX512", False, AVX512),
        ("x86_64", "AVX512", True, AVX512_BF16),
        ("aarch64", "DEFAULT", False, NEON),
        ("arm64", "SVE256", True, NEON_BF16),
    ],
)
def test_a_level_is_what_pytorch_uses(
    name: str,
    capability: str,
    bf16: bool,
    expected: Level | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, name, capability, bf16=bf16)

    assert levels.level() is expected
    assert levels.has_bf16_products() == (expected in (AVX512_BF16, NEON_BF16))
    assert levels.bf16_flags() == (("-mavx512bf16",) if expected is AVX512_BF16 else ())
    in_use = [row.split(" | ")[0] for row in levels.table() if row.endswith("| in use |")]
    assert in_use == ([] if expected is None else [f"| {expected.name}"])


@pytest.mark.parametrize("variable", levels.OF_ONEDNN)
def test_a_variable_of_onednn_takes_bf16_away(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, "x86_64", "AVX512", bf16=True)

    for value, expected in (
        ("AVX512_CORE_VNNI", AVX512),
        ("avx512_core", AVX512),
        ("AVX512_CORE_BF16", AVX512_BF16),
        ("ALL", AVX512_BF16),
    ):
        monkeypatch.setenv(variable, value)
        assert levels.level() is expected, value


def test_a_pytorch_that_cant_be_asked_about_bf16_is_taken_to_say_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, "x86_64", "AVX512", bf16=True)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")

    assert levels.level() is AVX512
