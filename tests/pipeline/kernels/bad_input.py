"""`python -m tests.pipeline.kernels.bad_input DIRECTORY`: what every operator makes of bad input.

A process of its own, in which no annotation is checked, as users have it; the GPU is the emulated
one, which tells of any memory touched beside the tensors, and operators with a kernel for the CPU
are asked as on a GPU and as on a CPU. It prints a JSON object of outcomes:
`refused: ...`, or by what the right result came about.
"""

import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels import (
    adam,
    append,
    append_reference,
    attention,
    choice,
    decode_reference,
    reference,
    sampling,
    sampling_reference,
)
from pipeline.kernels.cpu import attention as cpu_attention
from pipeline.kernels.cpu import decode as cpu_decode
from pipeline.kernels.cpu import draw as cpu_draw
from pipeline.kernels.cpu import linear
from pipeline.kernels.cuda import adam as cuda_adam
from pipeline.kernels.cuda.cache import CubinCache
from pipeline.kernels.cuda.driver import Driver
from pipeline.kernels.cuda.gpu import Gpu
from pipeline.kernels.decode_reference import Scores
from pipeline.kernels.logprobs import linear_logprobs
from pipeline.kernels.reference import AdamW, Weights
from pipeline.kernels.sampling_reference import Draw
from tests.pipeline.kernels.bad_input_cpu import ON_CPU
from tests.pipeline.kernels.cuda.emulated import Emulator
from tests.pipeline.kernels.inputs import (
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
    lambda inputs: step(inputs, adam.adamw_),
    lambda inputs: step(inputs, reference.adamw_),
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
    lambda inputs: reference.linear_logprobs(**inputs, temperature=1.0, entropy=False)[0],
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
        inputs, attention.decode_attention, longest=inputs["longest"], out=inputs.get("out")
    ),
    lambda inputs: attend(inputs, decode_reference.decode_attention),
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


ATTENTION_ON_CPU = replace(ATTENTION, on_gpu=False)


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
    lambda inputs: store(inputs, append.append_),
    lambda inputs: store(inputs, append_reference.append_),
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


def rows() -> Inputs:
    numbers = torch.tensor([[3, 4], [0, 9]])
    return {"logits": random(2, 40), "keys": numbers[0], "positions": numbers[1], "top_p": 0.9}


def drawn(inputs: Inputs, by: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
    top_p, top_k = inputs["top_p"], inputs.get("top_k")
    draw = Draw(seed=1, temperature=1.0, top_p=top_p, top_k=top_k)
    return list(by(inputs["logits"], inputs["keys"], inputs["positions"], draw))


SAMPLE = Operator(
    rows,
    lambda inputs: drawn(inputs, sampling.sample),
    lambda inputs: drawn(inputs, sampling_reference.sample),
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

OPERATORS = {
    "adamw": ADAMW,
    "logprobs": LOGPROBS,
    "attention": ATTENTION,
    "attention on a CPU": ATTENTION_ON_CPU,
    "append": APPEND,
    "sample": SAMPLE,
    **ON_CPU,
}


class Machine:
    """A process that can take its tensors for those of a GPU."""

    def __init__(self, emulator: Emulator, **settings: Any) -> None:
        self.emulator, self.settings = emulator, settings
        self.launches = 0

    def install(self) -> None:
        """Have operators find this GPU."""

        def gpu_of(_: object) -> Gpu:
            return self.emulator.gpu(**self.settings)

        launch = Driver.launch

        @functools.wraps(launch)
        def counted(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            launch(*args, **kwargs)

        def on_gpu(weights: Weights, gradient: Tensor) -> Any:
            # What lies at odd addresses is left to PyTorch before a GPU is looked for.
            found = find(weights, gradient)
            if isinstance(found, adam.NotBuiltError):
                return found
            kind = cuda_adam.kind_of(weights, gradient)
            return adam._on_gpu(gradient.device, kind)

        def on_cpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(kernel)
            def counted_too(*args: Any, **kwargs: Any) -> Any:
                self.launches += 1
                return kernel(*args, **kwargs)

            return counted_too

        find = adam._find
        adam._find, Driver.launch = on_gpu, counted
        cpu_decode.decode_attention = on_cpu(cpu_decode.decode_attention)
        cpu_attention.attention = on_cpu(cpu_attention.attention)
        cpu_draw.draw = on_cpu(cpu_draw.draw)
        linear.Linear.__call__ = on_cpu(linear.Linear.__call__)
        adam.gpu_of = choice.gpu_of = gpu_of  # pyright: ignore[reportAttributeAccessIssue]
        choice._compiled.cache_clear()
        adam._on_gpu.cache_clear()

    def outcome(self, operator: Operator, change: str) -> str:
        """What comes of a call."""
        inputs = operator.inputs()
        inputs |= operator.changes[change](inputs)
        choice.wanted = lambda *_: operator.on_gpu
        good = operator.inputs()
        with self.emulator.memory(*tensors_of(good)):
            operator.call(good)  # what a kernel is asked before it is trusted is no answer
        before = self.launches
        try:
            with self.emulator.memory(*tensors_of(inputs)):
                ours = operator.call(inputs)
        except ValueError as error:
            return f"refused: {error}"
        by = "the kernel" if self.launches > before else "PyTorch"
        return f"right by {by}" if alike(ours, operator.definition(inputs)) else f"wrong by {by}"


def tensors_of(inputs: Inputs) -> list[Tensor]:
    return [each for each in inputs.values() if isinstance(each, Tensor)]


def alike(ours: Any, theirs: Any) -> bool:
    """Equal but for the rounding of fp32."""
    if isinstance(ours, Tensor):
        ours, theirs = [ours], [theirs]
    return all(
        one.shape == other.shape and torch.allclose(one, other, atol=1e-5, equal_nan=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def main(directory: Path) -> None:
    emulator = Emulator(directory)
    unwritable = CubinCache(directory / "libemulator.so" / "cubins")
    machine = Machine(emulator)
    machine.install()
    outcomes: dict[str, str] = {}
    for name, operator in OPERATORS.items():
        for change in operator.changes:
            outcomes[f"{name}: {change}"] = machine.outcome(operator, change)
    for what, settings in {
        "a GPU that is too old": {"capability": 61},
        "a GPU that nobody knows yet": {"capability": 200},
        "a cache that can't be written": {"cubins": unwritable},
    }.items():
        machine.settings = settings
        choice._compiled.cache_clear()
        adam._on_gpu.cache_clear()
        for name, operator in OPERATORS.items():
            if operator.on_gpu and operator is not LOGPROBS:
                outcomes[f"{name}: {what}"] = machine.outcome(operator, "good")
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
