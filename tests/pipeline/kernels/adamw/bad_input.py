"""Bad input of the operator, and what comes of it: see `tests.pipeline.kernels.bad_input`."""

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.kernels.adamw import definition, dispatch
from pipeline.kernels.adamw.definition import AdamW, Weights
from tests.pipeline.kernels.operator_inputs import (
    META,
    Inputs,
    Operator,
    odd,
    random,
    strided,
)

STEP = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)


def vectors() -> Inputs:
    return {name: random(64) for name in ("master", "exp_avg", "gradient")} | {
        "exp_avg_sq": random(64).abs()
    }


def step(inputs: Inputs, by: Callable[[Weights, Tensor, AdamW], None]) -> list[Tensor]:
    tensors = {
        name: each.clone() if each.is_contiguous() else each for name, each in inputs.items()
    }
    # A clone lies where numbers belong; what shall not, is stepped itself.
    tensors |= {name: each for name, each in inputs.items() if each.data_ptr() % each.itemsize}
    gradient = tensors.pop("gradient")
    by(Weights(**tensors), gradient, STEP)
    return [tensors["exp_avg"].clone()]


ADAMW = Operator(
    vectors,
    lambda inputs: step(inputs, dispatch.adamw_),
    lambda inputs: step(inputs, definition.adamw_),
    {
        "good": lambda _: {},
        "dtype": lambda _: {"gradient": random(64).double()},
        "device": lambda _: {"master": random(64).to(META)},
        "stride": lambda given: {"exp_avg": strided(given["exp_avg"])},
        "address": lambda given: {"gradient": odd(given["gradient"])},
        "empty": lambda _: dict.fromkeys(vectors(), torch.zeros(0)),
        "length": lambda _: {"master": random(63)},
    },
)


OPERATORS = {"adamw": ADAMW}

EXPECTED = {
    "adamw: good": "right by the kernel",
    "adamw: dtype": (
        "refused: AdamW's gradient must be torch.float32 or torch.bfloat16 or torch.float16"
        " here, not torch.float64"
    ),
    "adamw: device": (
        "refused: AdamW steps flat vectors of one length on one device: master has shape"
        " (64,) on meta, the gradient has (64,) on cpu"
    ),
    "adamw: stride": "refused: AdamW steps contiguous vectors, and exp_avg has stride (2,)",
    "adamw: address": "right by PyTorch",
    "adamw: empty": "right by PyTorch",
    "adamw: length": (
        "refused: AdamW steps flat vectors of one length on one device: master has shape"
        " (63,) on cpu, the gradient has (64,) on cpu"
    ),
    "adamw: a GPU that is too old": "right by PyTorch",
    "adamw: a GPU that nobody knows yet": "right by the kernel",
    "adamw: a cache that can't be written": "right by the kernel",
}
"""By operator and what is bad of its input."""
