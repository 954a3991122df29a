"""The moments of a pass, and what lies outside of a model's blocks in them."""

from collections.abc import Iterator

from torch import Tensor

from pipeline.budget.models import CountedModel


def names(of: str) -> tuple[str, str, str]:
    """The moments of a pass."""
    return f"{of} blocks", f"{of} head", f"{of} backward"


def first_passes(of: str) -> str:
    """What the passes through a pipeline are called in which no gradient is there yet."""
    return f"{of} first"


def moments_of(of: str) -> frozenset[str]:
    """All of them."""
    return frozenset(names(of))


def trained_root(model: CountedModel) -> Iterator[Tensor]:
    """What lies outside of the blocks and learns."""
    *_, root = model.units()
    return (each for each in root.params.values() if each.requires_grad)


def whole_root(model: CountedModel) -> int:
    """Bytes of what lies outside of the blocks."""
    *_, root = model.units()
    return sum(each.nbytes for each in root.params.values())
