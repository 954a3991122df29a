"""Cases of log-probabilities: what is timed."""

from collections.abc import Iterator, Sequence

import torch

from pipeline.kernels.logprobs import definition, dispatch
from pipeline.kernels.timing import Sizes, Timed

WIDTH, WORDS = 64, 32_768


def timed(devices: Sequence[torch.device], sizes: Sizes) -> Iterator[Timed]:
    """A pass over that many tokens, forward and backward."""
    for device in devices:
        yield _timed(device, sizes.tokens)


def _timed(device: torch.device, tokens: int) -> Timed:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, WIDTH, generator=generator).to(device).requires_grad_()
        for size in (tokens, WORDS)
    )
    targets = torch.randint(0, WORDS, (tokens,), generator=generator).to(device)

    def ours() -> None:
        tile = tokens * WORDS // 4
        dispatch.linear_logprobs(hidden, weight, None, targets, tile=tile)[0].sum().backward()

    def plain() -> None:
        logprobs, _ = definition.linear_logprobs(
            hidden, weight, None, targets, temperature=1.0, entropy=False
        )
        logprobs.sum().backward()

    return Timed(
        name=f"log-probabilities on {device.type}, {tokens} x {WORDS}",
        state="PyTorch alone, in four tiles",
        ours=ours,
        definition=plain,
    )
