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


def at_head(model: CountedModel) -> Iterator[Tensor]:
    """What is whole at the end of a pass beside a block: of embeddings only those in the root."""
    units = (unit for unit in model.units() if unit.kind in ("head", "root"))
    return (each for unit in units for each in unit.params.values())
