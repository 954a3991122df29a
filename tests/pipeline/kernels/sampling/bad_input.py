"""Bad input of the operator, and what comes of it: see `tests.pipeline.kernels.bad_input`."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.sampling import cpu, definition, dispatch
from pipeline.kernels.sampling.definition import Draw
from tests.pipeline.kernels.operator_inputs import (
    META,
    Inputs,
    Operator,
    ints,
    odd,
    random,
    strided,
)


def rows() -> Inputs:
    numbers = torch.tensor([[3, 4], [0, 9]])
    return {"logits": random(2, 40), "keys": numbers[0], "positions": numbers[1], "top_p": 0.9}


def drawn(inputs: Inputs, by: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
    top_p, top_k = inputs["top_p"], inputs.get("top_k")
    draw = Draw(seed=1, temperature=1.0, top_p=top_p, top_k=top_k)
    return list(by(inputs["logits"], inputs["keys"], inputs["positions"], draw))


SAMPLE = Operator(
    rows,
    lambda inputs: drawn(inputs, dispatch.sample),
    lambda inputs: drawn(inputs, definition.sample),
    {
        "good": lambda _: {},
        "dtype": lambda _: {"keys": ints(3, 4)},
        "another dtype": lambda given: {"logits": given["logits"].double()},
        "whole numbers": lambda given: {"logits": given["logits"].int()},
        "device": lambda given: {"positions": given["positions"].to(META)},
        "stride": lambda given: {"logits": strided(given["logits"])},
        "address": lambda given: {"logits": odd(given["logits"])},
        "empty": lambda _: {
            "logits": random(0, 40),
            **dict.fromkeys(("keys", "positions"), torch.zeros(0, dtype=torch.long)),
        },
        "no words": lambda _: {"logits": random(2, 0)},
        "length": lambda _: {"keys": torch.tensor([1, 2, 3])},
        "too many words": lambda _: {"logits": random(2, 600_000)},
        "no share": lambda _: {"top_p": 0.0},
        "no share that is a number": lambda _: {"top_p": math.nan},
        "no candidates": lambda _: {"top_k": 0},
    },
)


def row_pair() -> Inputs:
    return {
        "logprobs": random(2, 40).log_softmax(dim=-1),
        "keys": np.array([3, 4], np.uint64),
        "positions": np.array([0, 9], np.uint64),
    }


def draw(inputs: Inputs) -> list[Tensor]:
    found = dispatch.draw(inputs["logprobs"], inputs["keys"], inputs["positions"], seed=1)
    return sampled(inputs) if found is None else list(found)


def sampled(inputs: Inputs) -> list[Tensor]:
    keys, positions = (
        torch.from_numpy(inputs[name].view(np.int64)) for name in ("keys", "positions")
    )
    settings = Draw(seed=1, temperature=1.0)
    return list(definition.sample(inputs["logprobs"], keys, positions, settings))


DRAW = Operator(
    row_pair,
    draw,
    sampled,
    {
        "good": lambda _: {},
        "dtype": lambda given: {"keys": given["keys"].view(np.int64)},
        "another dtype": lambda given: {"logprobs": given["logprobs"].double()},
        "stride": lambda given: {"logprobs": strided(given["logprobs"])},
        "stride of the keys": lambda given: {"keys": given["keys"].repeat(2)[::2]},
        "address": lambda given: {"logprobs": odd(given["logprobs"])},
        "empty": lambda _: {
            "logprobs": random(0, 40),
            **dict.fromkeys(("keys", "positions"), np.zeros(0, np.uint64)),
        },
        "no words": lambda _: {"logprobs": random(2, 0)},
        "a vector": lambda _: {"logprobs": random(40)},
        "length": lambda _: {"keys": np.array([1, 2, 3], np.uint64)},
    },
    on_gpu=False,
)


OPERATORS = {"sample": SAMPLE, "draw": DRAW}

KERNELS = ((cpu, "draw"),)
"""What counts as the CPU's kernel when it is called: attributes of what has them."""

EXPECTED = {
    "sample: good": "right by the kernel",
    "sample: dtype": (
        "refused: keys must be torch.int64, 2 of them side by side on cpu, and is torch.int32"
        " of shape (2,) and stride (1,) on cpu"
    ),
    "sample: another dtype": "right by PyTorch",
    "sample: whole numbers": (
        "refused: logits must be numbers of (sequences, words), and are torch.int32 of shape"
        " (2, 40)"
    ),
    "sample: device": (
        "refused: positions must be torch.int64, 2 of them side by side on cpu, and is"
        " torch.int64 of shape (2,) and stride (1,) on meta"
    ),
    "sample: stride": "right by PyTorch",
    "sample: address": "right by PyTorch",
    "sample: empty": "right by PyTorch",
    "sample: no words": (
        "refused: logits must be numbers of (sequences, words), and are torch.float32 of"
        " shape (2, 0)"
    ),
    "sample: length": (
        "refused: keys must be torch.int64, 2 of them side by side on cpu, and is torch.int64"
        " of shape (3,) and stride (1,) on cpu"
    ),
    "sample: too many words": "right by PyTorch",
    "sample: no share": (
        "refused: a temperature, top_p or min_p is out of range: Draw(seed=1,"
        " temperature=1.0, top_k=None, top_p=0.0, min_p=0.0)"
    ),
    "sample: no share that is a number": (
        "refused: a temperature, top_p or min_p is out of range: Draw(seed=1,"
        " temperature=1.0, top_k=None, top_p=nan, min_p=0.0)"
    ),
    "sample: no candidates": "refused: top_k must be above 0: 0",
    "sample: a GPU that is too old": "right by PyTorch",
    "sample: a GPU that nobody knows yet": "right by the kernel",
    "sample: a cache that can't be written": "right by the kernel",
    "draw: good": "right by the kernel",
    "draw: dtype": (
        "refused: keys must be uint64, 2 of them side by side, and is int64 of shape (2,) and"
        " strides (8,)"
    ),
    "draw: another dtype": (
        "refused: log-probabilities must be torch.float32 of (sequences, words), and are"
        " torch.float64 of shape (2, 40)"
    ),
    "draw: stride": "right by the kernel",
    "draw: stride of the keys": (
        "refused: keys must be uint64, 2 of them side by side, and is uint64 of shape (2,)"
        " and strides (16,)"
    ),
    "draw: address": "right by the kernel",
    "draw: empty": "right by the kernel",
    "draw: no words": (
        "refused: log-probabilities must be torch.float32 of (sequences, words), and are"
        " torch.float32 of shape (2, 0)"
    ),
    "draw: a vector": (
        "refused: log-probabilities must be torch.float32 of (sequences, words), and are"
        " torch.float32 of shape (40,)"
    ),
    "draw: length": (
        "refused: keys must be uint64, 2 of them side by side, and is uint64 of shape (3,)"
        " and strides (8,)"
    ),
}
"""By operator and what is bad of its input."""
