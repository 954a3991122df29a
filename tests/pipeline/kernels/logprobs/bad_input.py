"""Bad input of the operator, and what comes of it: see `tests.pipeline.kernels.bad_input`."""

import torch

from pipeline.kernels.logprobs import definition
from pipeline.kernels.logprobs.dispatch import linear_logprobs
from tests.pipeline.kernels.operator_inputs import (
    BF16,
    META,
    Inputs,
    Operator,
    ints,
    odd,
    random,
    strided,
)


def targets() -> Inputs:
    return {
        "hidden": random(5, 8),
        "weight": random(30, 8),
        "bias": None,
        "targets": torch.tensor([0, 29, 3, 3, 7]),
    }


LOGPROBS = Operator(
    targets,
    lambda inputs: linear_logprobs(**inputs, tile=40)[0],
    lambda inputs: definition.linear_logprobs(**inputs, temperature=1.0, entropy=False)[0],
    {
        "good": lambda _: {},
        "dtype": lambda _: {"targets": ints(0, 29, 3, 3, 7)},
        "another dtype": lambda _: {"hidden": random(5, 8).to(BF16)},
        "device": lambda _: {"weight": random(30, 8).to(META)},
        "stride": lambda given: {"hidden": strided(given["hidden"])},
        "address": lambda given: {"weight": odd(given["weight"])},
        "empty": lambda _: {"hidden": random(0, 8), "targets": torch.zeros(0, dtype=torch.long)},
        "no words": lambda _: {"weight": random(0, 8)},
        "length": lambda _: {"hidden": random(4, 8)},
    },
    on_gpu=False,
)


OPERATORS = {"logprobs": LOGPROBS}

EXPECTED = {
    "logprobs: good": "right by PyTorch",
    "logprobs: dtype": (
        "refused: log-probabilities: targets are a vector of int64, not torch.int32 of shape (5,)"
    ),
    "logprobs: another dtype": (
        "refused: log-probabilities: hidden is torch.bfloat16 on cpu, the output matrix"
        " torch.float32 and the targets on cpu"
    ),
    "logprobs: device": (
        "refused: log-probabilities: weight is torch.float32 on meta, the output matrix"
        " torch.float32 and the targets on cpu"
    ),
    "logprobs: stride": "right by PyTorch",
    "logprobs: address": "right by PyTorch",
    "logprobs: empty": "right by PyTorch",
    "logprobs: no words": (
        "refused: log-probabilities: the output matrix has shape (0, 8); it must have words"
        " and a width"
    ),
    "logprobs: length": (
        "refused: log-probabilities of 5 targets: hidden has shape (4, 8), not (5, 8)"
    ),
}
"""By operator and what is bad of its input."""
