"""Cases of attention of whole sequences: what is timed."""

from collections.abc import Iterator, Sequence

import torch

from pipeline.config import Kernels
from pipeline.kernels.causal_attention import cpu, definition, dispatch
from pipeline.kernels.decode_attention.cpu import piece_of
from pipeline.kernels.timing import Sizes, Timed, describe, name_of

HEADS, HEAD_SIZE = 16, 64


def timed(devices: Sequence[torch.device], sizes: Sizes) -> Iterator[Timed]:
    """One sequence in bf16, forward and backward, on the CPU."""
    del devices
    made = torch.randn(3, 1, sizes.tokens, HEADS, HEAD_SIZE).bfloat16().transpose(2, 3)
    query, key, value = (each.requires_grad_() for each in made.unbind())

    def learn_with(kernels: Kernels) -> None:
        dispatch.causal_attention(query, key, value, kernels=kernels).sum().backward()

    def plain() -> None:
        out = definition.causal_attention(query, key, value, scaling=HEAD_SIZE**-0.5)
        out.sum().backward()

    piece = piece_of(query.dtype, HEAD_SIZE)
    forward = piece if isinstance(piece, str) else cpu.forward_library()
    backward = describe(cpu.backward_library())
    yield Timed(
        name=f"attention of whole sequences on cpu, 1 x {sizes.tokens}, {name_of(query.dtype)}",
        state=f"forward {describe(forward)}; backward {backward}",
        ours=lambda: learn_with("auto"),
        without=lambda: learn_with("off"),
        definition=plain,
    )
