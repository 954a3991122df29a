"""Cases of sampling: inputs, specializations, and what is right."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.gpu import Gpu, Macros
from pipeline.kernels.sampling import Draw, cuda_macros, launch, reference_sample

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

TOLERANCE = 2e-6
"""Of a log-probability, in nats, besides the rounding of the score and of the highest to fp32."""


@dataclass(frozen=True)
class Case:
    """Logits and options of one call."""

    num_words: int
    draw: Draw
    dtype: torch.dtype = F32
    schedule: int = 0
    seed: int = 0

    def __str__(self) -> str:
        draw, name = self.draw, str(self.dtype).removeprefix("torch.")
        text = f"{name}-{self.num_words}-t{draw.temperature}"
        text += f"-k{draw.top_k}" * (draw.top_k is not None) + f"-p{draw.top_p}" * (draw.top_p < 1)
        return text + f"-min{draw.min_p}" * (draw.min_p > 0) + f"-order{self.schedule}"


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; what no kernel may read is NaN."""

    logits: Tensor
    keys: Tensor
    positions: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (self.logits, self.keys, self.positions)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Rows of five kinds, next to padding; an odd stride."""
    generator = torch.Generator().manual_seed(case.seed + case.num_words)
    logits = torch.full((6, case.num_words + 3), torch.nan)
    rows = 3 * torch.randn(6, case.num_words, generator=generator)
    rows[1] = (2 * rows[1]).round() / 2  # many are as likely as others
    rows[2, 1::2] = -torch.inf
    rows[3] *= 20  # nearly all far below the likeliest
    rows[4] = 0.5  # all alike
    rows[5] += 80
    logits[:, : case.num_words] = rows
    keys = torch.randint(0, 2**62, (6,), generator=generator)
    keys[0] = -7  # the words of 64 bits above 2^63
    positions = torch.arange(6) * 37
    wide = logits.to(case.dtype).to(device)
    return Inputs(wide[:, : case.num_words], keys.to(device), positions.to(device))


def run(case: Case, inputs: Inputs, gpu: Gpu) -> tuple[Tensor, Tensor]:
    """Run the kernel."""
    return launch(inputs.logits, inputs.keys, inputs.positions, case.draw, gpu=gpu)


def is_right(case: Case, inputs: Inputs, out: tuple[Tensor, Tensor]) -> bool:
    """The definition's tokens, and its log-probabilities but for rounding."""
    expected = reference_sample(inputs.logits, inputs.keys, inputs.positions, case.draw)
    # Each score is rounded by half of its last place, 2^-24 of it.
    largest = inputs.logits.abs().nan_to_num(posinf=0.0).amax(dim=1).float()
    allowed = TOLERANCE + 2.0**-23 * largest / (case.draw.temperature or 1.0)
    error = (out[1] - expected[1]).abs()
    return torch.equal(out[0], expected[0]) and bool((error < allowed).all())


def draws() -> list[Draw]:
    """Every option alone and with the others."""
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
    return [Draw(seed=2**63 + 11 + number, **each) for number, each in enumerate(options)]


QUICK = [
    Case(1001, draw, dtype, schedule=(0, 1, 7)[number % 3], seed=number)
    for number, (draw, dtype) in enumerate(zip(draws(), [F32, BF16] * 5, strict=True))
]
QUICK.append(Case(5001, draws()[3], BF16))
"""Every option once, and more segments than a warp looks at together."""

GRID = [
    Case(num_words, draw, dtype, schedule=(0, 1, 7)[number % 3], seed=7 * number)
    for dtype in (F32, BF16, F16)
    for num_words in (1, 37, 128, 129, 4097, 50_273)
    for number, draw in enumerate(draws())
]
"""Every option at sizes on both sides of a segment, of a warp and of a block.

No size times a top-p is a whole number: of words all alike a boundary would lie on one of them.
"""

SPECIALISATIONS: list[Macros] = [cuda_macros(dtype) for dtype in (BF16, F32, F16)]
"""Of the kernel for GPUs."""
