"""How long passes take: measured on this machine's processor, or from the data sheet of a GPU.

On a processor a block of the model's width is run for a moment, with random numbers in the place of
weights, and longer passes are scaled from it by their operations (`pipeline.budget.flops`). So the
cost of many small operations, which rules in small models, is in it as well as that of products.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.budget.flops import ModelFlops

PEAK = {"A100": 312, "A800": 312, "H100": 989, "H200": 989, "H20": 148, "B200": 2250, "L40S": 362}
"""TFLOP/s of bf16 on tensor cores without sparsity, as NVIDIA's data sheets have them."""

BANDWIDTH: Mapping[str, float] = {
    "A100": 2.0,
    "A800": 2.0,
    "H100": 3.35,
    "H200": 4.8,
    "H20": 4.0,
    "B200": 8.0,
    "L40S": 0.86,
}
"""TB/s of the memory, from there too."""

EFFICIENCY = 0.35
"""Share of the peak that training reaches on GPUs, between 20 and 50 %."""

LAUNCH = 1e-3
"""Seconds that one block takes on a GPU at least: the host launches its hundred operations."""

WIDEST, MOST_TOKENS = 2048, 512
"""Hidden size and tokens of the block that is measured; what is larger is scaled."""


@dataclass(frozen=True)
class Work:
    """A model as far as its speed goes."""

    flops: "ModelFlops"
    hidden: int
    vocabulary: int
    """Rows of the output layer; 0 for a model that scores."""

    parameters: int
    trained: int
    """Parameters that learn."""

    narrow: bool
    """Whether it computes in 16 bits."""


@dataclass(frozen=True)
class GpuSpeed:
    """Speed of a GPU by its data sheet."""

    peak: float
    bandwidth: float
    card: str
    spread: tuple[float, float] = (0.6, 2.0)
    """Factors of the shortest and the longest time that the estimate stands for."""

    @property
    def basis(self) -> str:
        """Share of what the card can do."""
        return f"{EFFICIENCY:.0%} of an {self.card}'s peak of {self.peak / 1e12:.0f} TFLOP/s"

    def forward(self, work: Work, *, tokens: float, length: float, passes: float) -> float:
        """Seconds of that many tokens, in sequences of such a length, cut into that many passes."""
        of_products = tokens * work.flops.forward(round(length)) / (EFFICIENCY * self.peak)
        of_reading = passes * 2 * work.parameters / self.bandwidth
        return max(of_products, of_reading, passes * work.flops.layers * LAUNCH)

    def train(self, work: Work, *, tokens: float, length: float, passes: float) -> float:
        """Seconds of forward and backward passes."""
        of_products = tokens * work.flops.train(round(length)) / (EFFICIENCY * self.peak)
        return max(of_products, passes * work.flops.layers * 3 * LAUNCH)

    def update(self, work: Work) -> float:
        """Seconds of an optimizer step."""
        return 16 * work.trained / self.bandwidth + work.flops.layers * LAUNCH


def gpu_speed(name: str) -> GpuSpeed | None:
    """The speed of a card by its name, as nvidia-smi or --plan-for have it; None if not known."""
    for card in sorted(PEAK, key=len, reverse=True):
        if card.lower() in name.lower():
            return GpuSpeed(PEAK[card] * 1e12, BANDWIDTH[card] * 1e12, card)
    return None


@dataclass(frozen=True)
class CpuSpeed:
    """Speed of this machine, by running a block on it."""

    threads: int
    """Of each process."""

    crowd: float = 1.0
    """Processes for each core, where there are more than cores."""

    spread: tuple[float, float] = (0.6, 1.7)
    basis: str = "blocks of such models, timed now, as if nothing else ran on this machine"

    def forward(self, work: Work, *, tokens: float, length: float, passes: float) -> float:
        """Seconds of that many tokens, in sequences of such a length, cut into that many passes."""
        return self._seconds(work, tokens, length, passes, trains=False)

    def train(self, work: Work, *, tokens: float, length: float, passes: float) -> float:
        """Seconds of forward and backward passes."""
        full = self._seconds(work, tokens, length, passes, trains=True)
        every = replace(work.flops, trained=work.flops.weights)
        return full * work.flops.train(round(length)) / every.train(round(length))

    def update(self, work: Work) -> float:
        """Seconds of an optimizer step."""
        from pipeline.budget.calibrate import update_seconds

        size = max(1, min(work.trained, 2**20))
        return self.crowd * update_seconds(size, self.threads) * work.trained / size

    def _seconds(
        self, work: Work, tokens: float, length: float, passes: float, *, trains: bool
    ) -> float:
        from pipeline.budget.calibrate import Timing, block_seconds, head_seconds

        if tokens <= 0:
            return 0.0
        passes = max(1.0, passes)
        of_pass = max(1, round(tokens / passes))
        count = min(2 ** round(math.log2(of_pass)), MOST_TOKENS)  # so that few shapes are timed
        width = min(work.hidden, WIDEST)
        in_blocks = work.flops.weights - work.vocabulary * work.hidden
        weights = in_blocks // max(1, work.flops.layers) * width**2 // work.hidden**2
        how = Timing(self.threads, trains=trains, narrow=work.narrow)
        row = min(2 ** round(math.log2(max(1.0, length))), count)
        # A model that scores has the blocks of one that writes, and is not timed again.
        inner = max(8, (weights - 4 * width**2) // (3 * width))
        block = block_seconds(width, inner, count, row, how)
        seconds = work.flops.layers * block * (work.hidden / width) ** 2
        if work.vocabulary:
            rows = min(work.vocabulary, 4096)
            few = min(count, 128)
            head = head_seconds(width, rows, few, how)
            seconds += head * (count / few) * (work.vocabulary / rows) * (work.hidden / width)
        return self.crowd * seconds * (of_pass / count) * passes


Speed = CpuSpeed | GpuSpeed
"""Of one process."""
