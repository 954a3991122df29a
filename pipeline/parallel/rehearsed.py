"""A group whose other processes aren't there, to see on one process whether code runs."""

from dataclasses import dataclass

from torch import Tensor

from pipeline.parallel.group import Group


@dataclass(frozen=True)
class RehearsedGroup(Group):
    """Each process is taken to have what this one has: shapes are right, numbers are not."""

    def gather(self, tensor: Tensor, *, what: str) -> list[Tensor]:  # noqa: ARG002
        """This process's tensor, once for each."""
        return [tensor.detach() for _ in self.ranks]

    def exchange(self, parts: Tensor, *, what: str) -> Tensor:  # noqa: ARG002
        """What this process has for itself, once for each."""
        own = parts.detach()[self.rank]
        return own.expand(self.size, *own.shape)


def rehearsed(size: int) -> RehearsedGroup:
    """The first of so many processes."""
    return RehearsedGroup(0, tuple(range(size)))
