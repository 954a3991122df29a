"""Parameters of which this process has a part, in the place of whole ones."""

import functools

import torch
from torch import Tensor, nn

from pipeline.engine.state import read_part
from pipeline.engine.stored import ReadElements, StoredParameter, stored_like
from pipeline.engine.tensor_parts import Part, mark_part


def replace_by_part(layer: nn.Module, leaf: str, part: Part) -> None:
    """Have a layer's parameter be this process's part of it; one in a file stays there.

    A parameter that is stored flat stays so.
    """
    param = layer.get_parameter(leaf)
    shape = part.own.shape(part.whole)
    if part.stored is not None:
        shape = torch.Size((shape.numel(),))
    if isinstance(param, StoredParameter):
        like = torch.empty(shape, dtype=param.dtype, device="meta")
        read = functools.partial(_read, part, param.read, param.dtype)
        own: nn.Parameter = stored_like(like, read, param.device)
    else:
        found = part.own.of(param.detach().view(part.whole))
        found = found.clone(memory_format=torch.contiguous_format).view(shape)
        own = nn.Parameter(found, requires_grad=False)
    own.requires_grad_(param.requires_grad)
    mark_part(own, part)
    setattr(layer, leaf, own)


def _read(part: Part, whole: ReadElements, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """Elements of a part, from where those of the whole are."""
    out = torch.empty(stop - start, dtype=dtype)

    def fill(first: int, values: Tensor) -> None:
        values.copy_(whole(first, first + len(values)))

    read_part(part, start, out, fill)
    return out
