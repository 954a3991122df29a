"""The CPU's kernels on 64-bit ARM, emulated: the bits of AVX2, whose vectors have as many lanes."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.kernels.adamw import cpu as adamw
from pipeline.kernels.adamw.definition import AdamW, Weights
from pipeline.kernels.causal_attention import cpu as causal_attention
from pipeline.kernels.decode_attention import cpu as decode_attention
from pipeline.kernels.linear import cpu as linear
from pipeline.kernels.products import cpu as products
from pipeline.kernels.sampling import cpu as sampling
from pipeline.kernels.toolchain import cpp
from pipeline.kernels.toolchain.cpp import EXACT, FUSED, NUMBERS, Built
from pipeline.kernels.toolchain.levels import AVX2, AVX512, AVX512_BF16, level
from tests.pipeline.kernels.arm.emulated import emulated, is_there

pytestmark = [
    pytest.mark.skipif(not is_there(), reason="needs a compiler for ARM and an emulator of it"),
    pytest.mark.skipif(level() not in (AVX2, AVX512, AVX512_BF16), reason="needs AVX2"),
]

Defines = Mapping[str, str | int]
BF16 = {"NUMBER": NUMBERS[torch.bfloat16]}

Kernels = Callable[..., tuple[Built, Built]]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kernels:
    """A kernel of this machine's processor with AVX2 alone, and the emulated one."""
    monkeypatch.setattr(cpp, "level", lambda: AVX2)

    def of(source: Path, defines: Defines, flags: tuple[str, ...] = FUSED) -> tuple[Built, Built]:
        return cpp.build(source, defines, flags), emulated(source, defines, flags, tmp_path)

    return of


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_of_few_rows(dtype: torch.dtype, both: Kernels) -> None:
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((7, 290), (75, 290), (75,)))
    order = linear.Order(192, bias_first=True)
    results: list[Tensor] = []

    for built in both(linear.SOURCE, {"NUMBER": NUMBERS[dtype]}):
        for matrix in (weight, weight.T.contiguous().T):
            results.append(torch.full((7, 75), torch.nan, dtype=dtype))
            linear.make(built, order, x, matrix, bias, results[-1])()

    assert results[0].isfinite().all()
    assert all(torch.equal(results[0], each) for each in results[1:])


@pytest.mark.grid
@pytest.mark.parametrize("turned", [False, True])
def test_products(both: Kernels, *, turned: bool) -> None:
    a, b, shift = random(1, 250, 301), random(1, 301, 281), random(1, 250, 281)
    a, b = (each.mT.contiguous().mT if turned else each for each in (a, b))
    results: list[Tensor] = []

    for built in both(products.SOURCE, BF16):
        results.append(torch.full_like(shift, torch.nan))
        products.multiply(a, b, shift, results[-1], alpha=0.5, beta=2.0, built=built)

    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_decoding(dtype: torch.dtype, both: Kernels) -> None:
    query, key, value = (
        random(3, 4, 40, dtype=dtype),
        *(random(3, 2, 600, 40, dtype=dtype) * scale for scale in (1, 2)),
    )
    defines: Defines = {"NUMBER": NUMBERS[dtype], "PIECE": 192}

    native, arm = (
        decode_attention.decode_attention(
            query,
            key,
            value,
            torch.tensor([600, 1, 333], dtype=torch.int32),
            scaling=0.2,
            sliding_window=None,
            built=built,
        )
        for built in both(decode_attention.SOURCE, defines)
    )

    assert native.isfinite().all()
    assert torch.equal(native, arm)


@pytest.mark.grid
def test_attention_of_whole_sequences_forward_and_backward(both: Kernels) -> None:
    query, key, value, grad = (random(2, 3, 70, 40) * scale for scale in (1, 2, 3, 4))
    forward = both(causal_attention.HERE / "cpu_forward.cpp", BF16)
    backward = both(causal_attention.HERE / "cpu_backward.cpp", BF16)

    (native, logsumexp), (arm, logsumexp_arm) = (
        causal_attention.attention(query, key, value, scaling=0.2, piece=192, built=built)
        for built in forward
    )
    grads, grads_arm = (
        causal_attention.attention_grad(
            grad, query, key, value, native, logsumexp, scaling=0.2, built=built
        )
        for built in backward
    )

    assert native.isfinite().all()
    assert torch.equal(native, arm)
    torch.testing.assert_close(logsumexp, logsumexp_arm, rtol=1e-6, atol=0)  # by the C library
    assert all(each.isfinite().all() for each in grads)
    assert all(map(torch.equal, grads, grads_arm))


@pytest.mark.grid
def test_tokens_that_are_drawn(both: Kernels) -> None:
    logprobs = random(5, 1003, dtype=torch.float32).log_softmax(dim=-1)
    keys, positions = np.arange(5, dtype=np.uint64), np.arange(7, 12, dtype=np.uint64)

    native, arm = (
        sampling.draw(logprobs, keys, positions, seed=3, built=built)
        for built in both(sampling.SOURCE, {"NUMBER": NUMBERS[torch.float32]})
    )

    assert native[1].isfinite().all()
    assert all(map(torch.equal, native, arm))


@pytest.mark.grid
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adamw(moments: torch.dtype, both: Kernels) -> None:
    variant = adamw.Variant(torch.bfloat16, moments, split=True)
    gradient = random(3000)
    step = AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=2, multiplier=0.5)

    native, arm = (
        _stepped(built, gradient, moments, step)
        for built in both(adamw.SOURCE, variant.defines, EXACT)
    )

    assert all(each.isfinite().all() for each in native if each.is_floating_point())
    assert all(map(torch.equal, native, arm))


def _stepped(
    built: Built, gradient: Tensor, moments: torch.dtype, step: AdamW
) -> tuple[Tensor, ...]:
    size = len(gradient)
    weights = Weights(
        master=random(size),
        exp_avg=random(size).to(moments),
        exp_avg_sq=random(size).abs().to(moments),
        low_bits=torch.arange(size).to(torch.int16),
    )
    adamw.run(built, weights, gradient, step, threads=1)
    return tuple(weights.tensors().values())
