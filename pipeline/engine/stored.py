"""Parameters whose numbers wait elsewhere until the engine takes its piece of them."""

from collections.abc import Callable

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from pipeline.engine.tensor_parts import MarkedParameter

ReadElements = Callable[[int, int], Shaped[Tensor, " n"]]
"""Elements `start` to `stop` of a flattened tensor, in its own dtype, on the CPU."""

READ_AT_ONCE = 2**21
"""Elements: the memory between file and vector."""


class StoredParameter(MarkedParameter):
    """A parameter with shape, dtype and device and no memory: every element reads as NaN, or 0.

    It makes room for models that no process could hold whole. Until the engine has laid it out, it
    can be frozen, tied, wrapped and copied like any other.
    """

    read: ReadElements
    """Reads elements of the parameter from where they are stored."""

    def __deepcopy__(self, memo: dict[int, object]) -> "StoredParameter":
        copy = stored_like(self, self.read)
        copy.part, copy.is_partial = self.part, self.is_partial
        memo[id(self)] = copy
        return copy

    def settle(self) -> None:
        """Be an ordinary parameter from now on: its data is set by someone who has read it."""
        del self.read
        is_marked = self.part is not None or self.is_partial
        kind = MarkedParameter if is_marked else nn.Parameter
        self.__class__ = kind  # pyright: ignore[reportAttributeAccessIssue]


def stored_like(
    param: Tensor, read: ReadElements, device: torch.device | None = None
) -> StoredParameter:
    """A parameter as `param` is, whose elements are what `read` says."""
    nothing = float("nan") if param.dtype.is_floating_point else 0
    hidden = torch.full((), nothing, dtype=param.dtype, device=device or param.device)
    stored = StoredParameter(hidden.expand(param.shape), param.requires_grad)
    stored.read = read
    return stored


def copy_elements(param: nn.Parameter, start: int, out: Shaped[Tensor, " n"]) -> None:
    """Fill `out` with the elements of a flattened parameter from `start` on, wherever they are."""
    if not isinstance(param, StoredParameter):
        out.copy_(param.detach().reshape(-1)[start : start + len(out)])
        return
    for part in out.split(READ_AT_ONCE):
        part.copy_(param.read(start, start + len(part)))
        start += len(part)
