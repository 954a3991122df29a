"""Bad input of the operator, and what comes of it: see `tests.pipeline.kernels.bad_input`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.decode_attention import cpu, definition, dispatch
from pipeline.kernels.decode_attention.definition import Scores
from tests.pipeline.kernels.operator_inputs import (
    BF16,
    META,
    Inputs,
    Operator,
    ints,
    odd,
    random,
    shifted,
    strided,
)


def queries() -> Inputs:
    return {
        "query": random(2, 4, 64),
        "key": random(2, 2, 9, 64),
        "value": random(2, 2, 9, 64) + 1,
        "lengths": ints(9, 5),
        "longest": 9,
    }


def attend(inputs: Inputs, by: Callable[..., Tensor], **settings: Any) -> Tensor:
    tensors = (inputs["query"], inputs["key"], inputs["value"])
    scores = Scores(
        lengths=inputs["lengths"],
        scaling=0.1,
        sliding_window=inputs.get("window"),
    )
    return by(*tensors, scores, **settings)


ATTENTION = Operator(
    queries,
    lambda inputs: attend(
        inputs, dispatch.decode_attention, longest=inputs["longest"], out=inputs.get("out")
    ),
    lambda inputs: attend(inputs, definition.decode_attention),
    {
        "good": lambda _: {},
        "dtype": lambda _: {"lengths": torch.tensor([9, 5])},
        "another dtype": lambda given: {"key": given["key"].to(BF16)},
        "whole numbers": lambda given: {"key": given["key"].int()},
        "device": lambda given: {"value": given["value"].to(META)},
        "stride": lambda given: {"key": strided(given["key"])},
        "address": lambda given: {"key": odd(given["key"])},
        "another address": lambda given: {"query": shifted(given["query"])},
        "empty": lambda _: {
            "query": random(0, 4, 64),
            **dict.fromkeys(("key", "value"), random(0, 2, 9, 64)),
            "lengths": ints(),
        },
        "no tokens": lambda _: {
            **dict.fromkeys(("key", "value"), random(2, 2, 0, 64)),
            "lengths": ints(0, 0),
            "longest": 0,
        },
        "no heads": lambda _: dict.fromkeys(("key", "value"), random(2, 0, 9, 64)),
        "length": lambda _: {"longest": 10},
        "lengths beyond the cache": lambda _: {"lengths": ints(12, 2**31 - 1)},
        "lengths and a window beyond the cache": lambda _: {"lengths": ints(12, 15), "window": 5},
        "lengths below 0": lambda _: {"lengths": ints(-4, -(2**31))},
        "no window": lambda _: {"window": 0},
        "fewer sequences": lambda given: {"key": given["key"][:1], "value": given["value"][:1]},
        "shorter values": lambda given: {"value": given["value"][:, :, :4].contiguous()},
        "another head size": lambda _: {"query": random(2, 4, 32)},
        "a place for the result": lambda _: {"out": random(2, 4, 64)},
        "a place for another result": lambda _: {"out": random(2, 4, 32)},
    },
)


OPERATORS = {"attention": ATTENTION, "attention on a CPU": replace(ATTENTION, on_gpu=False)}

KERNELS = ((cpu, "decode_attention"),)
"""What counts as the CPU's kernel when it is called: attributes of what has them."""

EXPECTED = {
    "attention: good": "right by the kernel",
    "attention: dtype": (
        "refused: lengths must be torch.int32, 2 of them side by side, and is torch.int64 of"
        " shape (2,) and stride (1,)"
    ),
    "attention: another dtype": "right by PyTorch",
    "attention: whole numbers": (
        "refused: key must be numbers in 4 dimensions, and is torch.int32 of shape (2, 2, 9, 64)"
    ),
    "attention: device": "refused: value is on meta, the query on cpu",
    "attention: stride": "right by PyTorch",
    "attention: address": "right by PyTorch",
    "attention: another address": "right by PyTorch",
    "attention: empty": "right by PyTorch",
    "attention: no tokens": "right by the kernel",
    "attention: no heads": "refused: 4 query heads can't share 0 heads of keys",
    "attention: length": "refused: the cache holds 9 tokens of a sequence, not 10",
    "attention: lengths beyond the cache": "right by the kernel",
    "attention: lengths and a window beyond the cache": "right by the kernel",
    "attention: lengths below 0": "right by the kernel",
    "attention: no window": "refused: a sliding window has a token at least, not 0",
    "attention: fewer sequences": (
        "refused: keys and values must be of the same 2 sequences as the query, and have"
        " shapes (1, 2, 9, 64) and (1, 2, 9, 64)"
    ),
    "attention: shorter values": (
        "refused: keys and values must be of the same 2 sequences as the query, and have"
        " shapes (2, 2, 9, 64) and (2, 2, 4, 64)"
    ),
    "attention: another head size": "refused: keys have 64 numbers a head, the query 32",
    "attention: a place for the result": "right by the kernel",
    "attention: a place for another result": (
        "refused: out must be torch.float32 on cpu of shape (2, 4, 64), side by side, and is"
        " torch.float32 on cpu of shape (2, 4, 32) and stride (128, 32, 1)"
    ),
    "attention: a GPU that is too old": "right by PyTorch",
    "attention: a GPU that nobody knows yet": "right by the kernel",
    "attention: a cache that can't be written": "right by the kernel",
    "attention on a CPU: good": "right by the kernel",
    "attention on a CPU: dtype": (
        "refused: lengths must be torch.int32, 2 of them side by side, and is torch.int64 of"
        " shape (2,) and stride (1,)"
    ),
    "attention on a CPU: another dtype": "right by PyTorch",
    "attention on a CPU: whole numbers": (
        "refused: key must be numbers in 4 dimensions, and is torch.int32 of shape (2, 2, 9, 64)"
    ),
    "attention on a CPU: device": "refused: value is on meta, the query on cpu",
    "attention on a CPU: stride": "right by PyTorch",
    "attention on a CPU: address": "right by PyTorch",
    "attention on a CPU: another address": "right by the kernel",
    "attention on a CPU: empty": "right by PyTorch",
    "attention on a CPU: no tokens": "right by the kernel",
    "attention on a CPU: no heads": "refused: 4 query heads can't share 0 heads of keys",
    "attention on a CPU: length": "refused: the cache holds 9 tokens of a sequence, not 10",
    "attention on a CPU: lengths beyond the cache": "right by the kernel",
    "attention on a CPU: lengths and a window beyond the cache": "right by the kernel",
    "attention on a CPU: lengths below 0": "right by the kernel",
    "attention on a CPU: no window": "refused: a sliding window has a token at least, not 0",
    "attention on a CPU: fewer sequences": (
        "refused: keys and values must be of the same 2 sequences as the query, and have"
        " shapes (1, 2, 9, 64) and (1, 2, 9, 64)"
    ),
    "attention on a CPU: shorter values": (
        "refused: keys and values must be of the same 2 sequences as the query, and have"
        " shapes (2, 2, 9, 64) and (2, 2, 4, 64)"
    ),
    "attention on a CPU: another head size": "refused: keys have 64 numbers a head, the query 32",
    "attention on a CPU: a place for the result": "right by the kernel",
    "attention on a CPU: a place for another result": (
        "refused: out must be torch.float32 on cpu of shape (2, 4, 64), side by side, and is"
        " torch.float32 on cpu of shape (2, 4, 32) and stride (128, 32, 1)"
    ),
}
"""By operator and what is bad of its input."""
