"""Bad input of the operator, and what comes of it: see `tests.pipeline.kernels.bad_input`."""

import torch
from torch import Tensor

from pipeline.kernels.causal_attention import cpu, definition
from pipeline.kernels.causal_attention.dispatch import causal_attention
from tests.pipeline.kernels.operator_inputs import (
    BF16,
    META,
    Inputs,
    Operator,
    odd,
    random,
    shifted,
    strided,
)


def whole() -> Inputs:
    """Queries of 0 and values that are all alike, so that the result is one of them, unrounded."""
    return {
        "query": torch.zeros(1, 2, 9, 16, dtype=BF16),
        "key": random(1, 2, 9, 16).to(BF16),
        "value": torch.full((1, 2, 9, 16), 3.0, dtype=BF16),
    }


def attend(inputs: Inputs) -> Tensor:
    return causal_attention(**inputs).double()


def attended(inputs: Inputs) -> Tensor:
    doubled = {name: each.double() for name, each in inputs.items()}
    return definition.causal_attention(**doubled, scaling=1.0)


def of_all(shape: tuple[int, ...]) -> Inputs:
    return {name: torch.zeros(shape, dtype=BF16) for name in whole()}


CAUSAL = Operator(
    whole,
    attend,
    attended,
    {
        "good": lambda _: {},
        "dtype": lambda given: {name: each.double() for name, each in given.items()},
        "another dtype": lambda given: {"key": given["key"].float()},
        "whole numbers": lambda given: {"key": given["key"].int()},
        "device": lambda given: {"value": given["value"].to(META)},
        "stride": lambda given: {"key": strided(given["key"])},
        "stride of the tokens": lambda given: {"key": given["key"][:, :, :1].expand(1, 2, 9, 16)},
        "address": lambda given: {"key": odd(given["key"])},
        "another address": lambda given: {"query": shifted(given["query"])},
        "empty": lambda _: of_all((0, 2, 9, 16)),
        "no tokens": lambda _: of_all((1, 2, 0, 16)),
        "no heads": lambda _: of_all((1, 0, 9, 16)),
        "an odd head": lambda _: of_all((1, 2, 9, 15)),
        "a head that is too large": lambda _: of_all((1, 2, 9, 512)),
        "more keys": lambda _: {
            "key": torch.zeros(1, 2, 12, 16, dtype=BF16),
            "value": torch.full((1, 2, 12, 16), 3.0, dtype=BF16),
        },
        "fewer keys": lambda given: {name: given[name][:, :, :4] for name in ("key", "value")},
        "fewer values": lambda given: {"value": given["value"][:, :, :4]},
        "another head size": lambda _: {"query": torch.zeros(1, 2, 9, 8, dtype=BF16)},
        "three dimensions": lambda given: {"key": given["key"][0]},
    },
    on_gpu=False,
)


OPERATORS = {"causal": CAUSAL}

KERNELS = ((cpu, "attention"),)
"""What counts as the CPU's kernel when it is called: attributes of what has them."""

EXPECTED = {
    "causal: good": "right by the kernel",
    "causal: dtype": "right by PyTorch",
    "causal: another dtype": (
        "refused: key is torch.float32 on cpu, the query torch.bfloat16 on cpu"
    ),
    "causal: whole numbers": (
        "refused: key must be numbers in 4 dimensions, and is torch.int32 of shape (1, 2, 9, 16)"
    ),
    "causal: device": "refused: value is torch.bfloat16 on meta, the query torch.bfloat16 on cpu",
    "causal: stride": "right by the kernel",
    "causal: stride of the tokens": "right by the kernel",
    "causal: address": "right by PyTorch",
    "causal: another address": "right by the kernel",
    "causal: empty": "right by PyTorch",
    "causal: no tokens": "right by PyTorch",
    "causal: no heads": "refused: queries of shape (1, 0, 9, 16) have no heads",
    "causal: an odd head": "right by PyTorch",
    "causal: a head that is too large": "right by PyTorch",
    "causal: more keys": "right by PyTorch",
    "causal: fewer keys": (
        "refused: keys of shape (1, 2, 4, 16) are not those of queries of (1, 2, 9, 16)"
    ),
    "causal: fewer values": (
        "refused: values of shape (1, 2, 4, 16) are not those of keys of (1, 2, 9, 16)"
    ),
    "causal: another head size": (
        "refused: keys of shape (1, 2, 9, 16) are not those of queries of (1, 2, 9, 8)"
    ),
    "causal: three dimensions": (
        "refused: key must be numbers in 4 dimensions, and is torch.bfloat16 of shape (2, 9, 16)"
    ),
}
"""By operator and what is bad of its input."""
