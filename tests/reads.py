"""Finds code that reads a tensor on the host, which on a GPU waits for all earlier work."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parent.parent
READERS = {
    *("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"),
    *("nonzero", "unique", "masked_select", "equal", "allclose", "is_nonzero"),
}


class DeviceReads(TorchFunctionMode):
    """Counts reads by file and function of this project, while the function `within` is running."""

    def __init__(self, within: str) -> None:
        super().__init__()
        self.within = within
        self.counts = Counter[str]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in READERS or (name in ("__getitem__", "__setitem__") and _is_mask(args[1])):
            codes = [frame.f_code for frame in _frames(sys._getframe(1)) if _is_project_code(frame)]
            if self.within in [code.co_name for code in codes]:
                file = Path(codes[0].co_filename).relative_to(ROOT)
                self.counts[f"{file}: {codes[0].co_name}"] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(item, Tensor) and item.dtype == torch.bool for item in indices)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_project_code(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return path.is_relative_to(ROOT) and path != Path(__file__)
