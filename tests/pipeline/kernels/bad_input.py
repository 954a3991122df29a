"""`python -m tests.pipeline.kernels.bad_input DIRECTORY`: what every operator makes of bad input.

A process of its own, in which no annotation is checked, as users have it; the GPU is the emulated
one, which tells of any memory touched beside the tensors, and operators with a kernel for the CPU
are asked as on a GPU and as on a CPU. What is asked is in the `bad_input.py` of each operator's
tests. It prints a JSON object of outcomes: `refused: ...`, or by what the right result came about.
"""

import functools
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels import choice
from pipeline.kernels.adamw import cuda as adamw_cuda
from pipeline.kernels.adamw import dispatch as adamw
from pipeline.kernels.adamw.definition import Weights
from pipeline.kernels.emulator.emulated import Emulator
from pipeline.kernels.operators import operators
from pipeline.kernels.toolchain.cpp import NotBuiltError
from pipeline.kernels.toolchain.cubins import CubinCache
from pipeline.kernels.toolchain.driver import Driver
from pipeline.kernels.toolchain.gpu import Gpu
from tests.pipeline.kernels.operator_inputs import Inputs, Operator

MODULES = [import_module(f"tests.pipeline.kernels.{name}.bad_input") for name in operators()]

OPERATORS: dict[str, Operator] = {
    name: operator for module in MODULES for name, operator in module.OPERATORS.items()
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
            if isinstance(found, NotBuiltError):
                return found
            return adamw._on_gpu(gradient.device, adamw_cuda.kind_of(weights, gradient))

        def on_cpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(kernel)
            def counted_too(*args: Any, **kwargs: Any) -> Any:
                self.launches += 1
                return kernel(*args, **kwargs)

            return counted_too

        find = adamw._find
        adamw._find, Driver.launch = on_gpu, counted
        for module in MODULES:
            for owner, name in getattr(module, "KERNELS", ()):
                setattr(owner, name, on_cpu(getattr(owner, name)))
        choice.gpu_of = gpu_of  # pyright: ignore[reportAttributeAccessIssue]
        choice._compiled.cache_clear()

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
        for name, operator in OPERATORS.items():
            if operator.on_gpu:
                outcomes[f"{name}: {what}"] = machine.outcome(operator, "good")
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
