"""Bad input of the operator, and what comes of it: see `tests.pipeline.kernels.bad_input`."""

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.kernels.cache_append import definition, dispatch
from tests.pipeline.kernels.operator_inputs import (
    BF16,
    META,
    Inputs,
    Operator,
    ints,
    random,
    shifted,
    strided,
)


def appended() -> Inputs:
    return {
        "keys": random(2, 3, 8, 64),
        "values": random(2, 3, 8, 64),
        "key": random(3, 4, 64) + 1,
        "value": random(3, 4, 64) + 2,
        "places": torch.tensor([0, 15, 7, 8]),
    }


def store(inputs: Inputs, by: Callable[..., None]) -> list[Tensor]:
    given = inputs["keys"], inputs["values"]
    cache = given if given[0].data_ptr() % 16 else tuple(each.clone() for each in given)
    if not given[0].is_contiguous():
        cache = strided(given[0]), given[1]
    by(cache, (inputs["key"], inputs["value"]), inputs["places"])
    return [each.clone() for each in cache]


APPEND = Operator(
    appended,
    lambda inputs: store(inputs, dispatch.append_),
    lambda inputs: store(inputs, definition.append_),
    {
        "good": lambda _: {},
        "dtype": lambda given: {"key": given["key"].to(BF16)},
        "another dtype": lambda _: {"places": ints(0, 15, 7, 8)},
        "device": lambda given: {"value": given["value"].to(META)},
        "stride": lambda given: {"key": strided(given["key"])},
        "stride of the cache": lambda given: {"keys": strided(given["keys"])},
        "address": lambda given: {"key": shifted(given["key"])},
        "odd size": lambda _: {"keys": random(2, 3, 8, 3), "key": random(3, 4, 3)},
        "empty": lambda _: {
            **dict.fromkeys(("key", "value"), random(3, 0, 64)),
            "places": torch.zeros(0, dtype=torch.long),
        },
        "no slots": lambda _: dict.fromkeys(("keys", "values"), random(0, 3, 8, 64)),
        "length": lambda _: {"places": torch.tensor([0, 15, 7])},
        "places beyond the cache": lambda _: {"places": torch.tensor([0, 16, 2**62, -1])},
        "shorter values": lambda given: {"values": given["values"][:, :, :4].contiguous()},
    },
)


OPERATORS = {"append": APPEND}

EXPECTED = {
    "append: good": "right by the kernel",
    "append: dtype": "refused: the cache has keys of torch.float32, new ones are torch.bfloat16",
    "append: another dtype": (
        "refused: places must be int64, side by side, and are torch.int32 of shape (4,) and"
        " stride (1,)"
    ),
    "append: device": "refused: the cache is on cpu, new values or places on meta",
    "append: stride": "right by PyTorch",
    "append: stride of the cache": "right by PyTorch",
    "append: address": "right by PyTorch",
    "append: odd size": "right by PyTorch",
    "append: empty": "right by PyTorch",
    "append: no slots": (
        "refused: a cache holds keys and values of (slots, heads, tokens, size), none of them"
        " 0, and its keys have shape (0, 3, 8, 64) beside (0, 3, 8, 64)"
    ),
    "append: length": "refused: new keys must have shape (3, 3, 64), not (3, 4, 64)",
    "append: places beyond the cache": "right by the kernel",
    "append: shorter values": (
        "refused: a cache holds keys and values of (slots, heads, tokens, size), none of them"
        " 0, and its values have shape (2, 3, 4, 64) beside (2, 3, 8, 64)"
    ),
    "append: a GPU that is too old": "right by PyTorch",
    "append: a GPU that nobody knows yet": "right by the kernel",
    "append: a cache that can't be written": "right by the kernel",
}
"""By operator and what is bad of its input."""
