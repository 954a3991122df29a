"""Bad input of operators with kernels for CPUs alone: see `tests.pipeline.kernels.bad_input`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels import causal_reference, sampling, sampling_reference
from pipeline.kernels.causal import causal_attention
from pipeline.kernels.cpu import linear
from pipeline.kernels.sampling_reference import Draw
from tests.pipeline.kernels.inputs import (
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
    found = linear.prepare(**inputs)
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
    return causal_reference.causal_attention(**doubled, scaling=1.0)


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


def row_pair() -> Inputs:
    return {
        "logprobs": random(2, 40).log_softmax(dim=-1),
        "keys": np.array([3, 4], np.uint64),
        "positions": np.array([0, 9], np.uint64),
    }


def draw(inputs: Inputs) -> list[Tensor]:
    found = sampling.draw(inputs["logprobs"], inputs["keys"], inputs["positions"], seed=1)
    return drawn(inputs) if found is None else list(found)


def drawn(inputs: Inputs) -> list[Tensor]:
    keys, positions = (
        torch.from_numpy(inputs[name].view(np.int64)) for name in ("keys", "positions")
    )
    settings = Draw(seed=1, temperature=1.0)
    return list(sampling_reference.sample(inputs["logprobs"], keys, positions, settings))


DRAW = Operator(
    row_pair,
    draw,
    drawn,
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

ON_CPU: dict[str, Operator] = {"causal": CAUSAL, "draw": DRAW, "linear": LINEAR}
