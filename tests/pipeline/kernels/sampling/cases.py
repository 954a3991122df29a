"""Cases of sampling: inputs, specializations and expected results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.engine.sampling import Sampler
from pipeline.kernels.gpu import Gpu, Macros
from pipeline.kernels.sampling import Draw, cuda_macros, launch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

TOLERANCE = 2e-6
"""Error of a log-probability, in nats, in addition to the rounding of scores to fp32."""


@dataclass(frozen=True)
class Case:
    """Logits and options of one call."""

    vocab_size: int
    draw: Draw
    dtype: torch.dtype = F32
    schedule: int = 0
    seed: int = 0

    def __str__(self) -> str:
        draw, name = self.draw, str(self.dtype).removeprefix("torch.")
        text = f"{name}-{self.vocab_size}-t{draw.temperature}"
        text += f"-k{draw.top_k}" * (draw.top_k is not None) + f"-p{draw.top_p}" * (draw.top_p < 1)
        return text + f"-min{draw.min_p}" * (draw.min_p > 0) + f"-order{self.schedule}"


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; elements that a kernel must not read are NaN."""

    logits: Tensor
    keys: Tensor
    positions: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return (self.logits, self.keys, self.positions)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Return rows of five kinds, next to padding; an odd stride."""
    generator = torch.Generator().manual_seed(case.seed + case.vocab_size)
    logits = torch.full((6, case.vocab_size + 3), torch.nan)
    rows = 3 * torch.randn(6, case.vocab_size, generator=generator)
    rows[1] = (2 * rows[1]).round() / 2  # many ties
    rows[2, 1::2] = -torch.inf
    rows[3] *= 20  # nearly all far less likely than the likeliest
    rows[4] = 0.5  # all equal
    rows[5] += 80
    logits[:, : case.vocab_size] = rows
    keys = torch.randint(0, 2**62, (6,), generator=generator)
    keys[0] = -7  # above 2^63 as an unsigned number
    positions = torch.arange(6) * 37
    wide = logits.to(case.dtype).to(device)
    return Inputs(wide[:, : case.vocab_size], keys.to(device), positions.to(device))


def run(case: Case, inputs: Inputs, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """Run the kernel."""
    return launch(inputs.logits, inputs.keys, inputs.positions, case.draw, gpu=gpu)


def is_correct(case: Case, inputs: Inputs, out: tuple[Tensor, Tensor]) -> bool:
    """Return whether tokens and, except for rounding, log-probabilities are the definition's."""
    sampler = Sampler(**vars(case.draw))
    keys = [key % 2**64 for key in inputs.keys.tolist()]
    expected = sampler(inputs.logits.double(), keys, inputs.positions.tolist())
    # Each score is rounded by up to half a unit in the last place, 2^-24 of it.
    largest = inputs.logits.abs().nan_to_num(posinf=0.0).amax(dim=1).float()
    allowed = TOLERANCE + 2.0**-23 * largest / (case.draw.temperature or 1.0)
    error = (out[1] - torch.tensor(expected[1])).abs()
    return out[0].tolist() == expected[0] and bool((error < allowed).all())


def make_draws() -> list[Draw]:
    """Return every option alone and with the others."""
    options: Sequence[dict[str, float]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
        {"temperature": 0.05, "top_p": 0.999999},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 10**6, "top_p": 1e-9, "min_p": 1.0},
    ]
    return [Draw(seed=2**63 + 11 + number, **option) for number, option in enumerate(options)]


QUICK = [
    Case(1001, draw, dtype, schedule=(0, 1, 7)[number % 3], seed=number)
    for number, (draw, dtype) in enumerate(zip(make_draws(), [F32, BF16] * 5, strict=True))
]
QUICK.append(Case(5001, make_draws()[3], BF16))
"""Every option once, and more segments than a warp handles at once."""

GRID = [
    Case(vocab_size, draw, dtype, schedule=(0, 1, 7)[number % 3], seed=7 * number)
    for dtype in (F32, BF16, F16)
    for vocab_size in (1, 37, 128, 129, 4097, 50_273)
    for number, draw in enumerate(make_draws())
]
"""Every option at sizes on both sides of a segment, of a warp and of a block.

No size times a top-p is an integer: the boundary would coincide with a token if all are equal.
"""

SPECIALIZATIONS: list[Macros] = [cuda_macros(dtype) for dtype in (BF16, F32, F16)]
"""Specializations of the GPU kernel."""
