"""A unit of a model as the engine holds it."""

from torch import nn

from pipeline.engine.flat import FlatParams
from pipeline.engine.trained import TrainedParams
from pipeline.engine.units import Kind


class Unit:
    """A transformer block, embedding or output matrix, or the root, as the engine holds it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        flats: list[FlatParams],
        trained: list[TrainedParams],
        kind: Kind = "block",
    ) -> None:
        self.name, self.module, self.kind = name, module, kind
        self.flats, self.trained = flats, trained
        self.in_backward = False
        """From the arrival of its output's gradient until its reduction has started."""
        self.expects_backward = False
        """Whether a forward pass has left a graph for autograd."""

    @property
    def gathered(self) -> bool:
        """Whether all its weights are here."""
        return all(flat.gathered for flat in self.flats)

    def start_read(self) -> None:
        """Start reading its own shards from the disk, if they are there."""
        for flat in self.flats:
            flat.start_read()

    def start_gather(self) -> None:
        """Start gathering its weights."""
        for flat in self.flats:
            flat.start_gather()

    def gather(self) -> None:
        """Gather its weights, and wait for them."""
        self.start_gather()
        for flat in self.flats:
            flat.gather()

    def free(self) -> None:
        """Release the memory of the other processes' shards."""
        for flat in self.flats:
            flat.free()
