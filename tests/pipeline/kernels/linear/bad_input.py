"""Bad input of the operator, and what comes of it: see `tests.pipeline.kernels.bad_input`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels.linear import dispatch
from pipeline.kernels.linear.cpu import Linear
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


def layer() -> Inputs:
    return {
        "x": random(3, 48),
        "weight": random(32, 48),
        "bias": random(32),
        "out": torch.full((3, 32), torch.nan),
        "rows": 3,
    }


def multiply(inputs: Inputs) -> Tensor:
    rows = inputs.pop("rows")
    found = dispatch.prepare(**inputs)
    if found is None:
        return multiplied(inputs)
    found.take(rows)
    found()
    return inputs["out"]


def multiplied(inputs: Inputs) -> Tensor:
    # The sum of a product and a matrix is what such a "bias" may come from.
    product = F.linear(inputs["x"], inputs["weight"])
    return product if inputs["bias"] is None else product + inputs["bias"]


LINEAR = Operator(
    layer,
    multiply,
    multiplied,
    {
        "good": lambda _: {},
        "no bias": lambda _: {"bias": None},
        "dtype": lambda _: {
            name: each.double() for name, each in layer().items() if name != "rows"
        },
        "another dtype": lambda given: {"out": given["out"].to(BF16)},
        "device": lambda given: {"out": given["out"].to(META)},
        "stride": lambda given: {"x": strided(given["x"])},
        "stride of the bias": lambda given: {"bias": strided(given["bias"])},
        "stride of the weight": lambda given: {"weight": strided(given["weight"])},
        "address": lambda given: {"weight": odd(given["weight"])},
        "another address": lambda given: {"bias": shifted(given["bias"])},
        "empty": lambda _: {"x": random(0, 48), "out": random(0, 32)},
        "no inputs": lambda _: {"x": random(3, 0), "weight": random(32, 0)},
        "a vector": lambda _: {"x": random(48), "out": random(32)},
        "a weight that is a vector": lambda _: {
            "weight": random(48),
            "bias": random(1),
            "out": random(3),
        },
        "a bias for each row": lambda _: {"bias": random(3, 32)},
        "a bias of one number": lambda _: {"bias": random(1)},
        "a result of another shape": lambda _: {"out": random(96)},
        "rows that there are not": lambda _: {"rows": 4},
        "rows below 0": lambda _: {"rows": -1},
    },
    on_gpu=False,
)


OPERATORS = {"linear": LINEAR}

KERNELS = ((Linear, "__call__"),)
"""What counts as the CPU's kernel when it is called: attributes of what has them."""

EXPECTED = {
    "linear: good": "right by the kernel",
    "linear: no bias": "right by the kernel",
    "linear: dtype": "right by PyTorch",
    "linear: another dtype": "right by PyTorch",
    "linear: device": "right by PyTorch",
    "linear: stride": "right by PyTorch",
    "linear: stride of the bias": "right by PyTorch",
    "linear: stride of the weight": "right by PyTorch",
    "linear: address": "right by PyTorch",
    "linear: another address": "right by the kernel",
    "linear: empty": "right by PyTorch",
    "linear: no inputs": "right by PyTorch",
    "linear: a vector": "right by PyTorch",
    "linear: a weight that is a vector": "right by PyTorch",
    "linear: a bias for each row": "right by PyTorch",
    "linear: a bias of one number": "right by PyTorch",
    "linear: a result of another shape": "right by PyTorch",
    "linear: rows that there are not": ("refused: this linear layer was made for 3 rows, not 4"),
    "linear: rows below 0": "refused: this linear layer was made for 3 rows, not -1",
}
"""By operator and what is bad of its input."""
