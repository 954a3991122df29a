"""Moving an engine's tensors off the device between uses, and back to the same places."""

from collections.abc import Collection, Iterator
from typing import Literal

import torch
from torch import Tensor

from pipeline.engine.trained import TrainedParams
from pipeline.engine.zero import ZeroModel
from pipeline.kernels.pinned_memory import pinned_empty

Kind = Literal["weights", "masters", "moments", "gradients"]
KINDS: tuple[Kind, ...] = ("weights", "masters", "moments", "gradients")


class RolloutOffload:
    """Copies of storages in main memory, made to free the device.

    A storage keeps its identity: only its bytes move, so that every view of it stays valid.
    """

    def __init__(self, zero: ZeroModel, groups: list[TrainedParams]) -> None:
        self.zero, self.groups = zero, groups
        self._offloaded: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are in main memory instead of on the device."""
        return sum(copy.nbytes() for _, copy in self._offloaded)

    def begin(self, kinds: Collection[Kind]) -> None:
        """Move tensors of these kinds to main memory.

        Masters that are the weights move with the weights; of split ones the low bits are masters.
        """
        offloaded = {storage.data_ptr() for storage, _ in self._offloaded}
        for tensor in self._tensors(kinds):
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or not storage.resizable() or storage.data_ptr() in offloaded:
                continue
            offloaded.add(storage.data_ptr())
            new = pinned_empty if storage.device.type == "cuda" else torch.empty
            copy = new(storage.nbytes(), dtype=torch.uint8)
            copy.untyped_storage().copy_(storage)
            self._offloaded.append((storage, copy.untyped_storage()))
        self.zero.is_offloaded = True
        if "weights" in kinds:
            self.zero.hide()
        for storage, _ in self._offloaded:
            storage.resize_(0)

    def end(self) -> None:
        """Move everything back."""
        for storage, copy in self._offloaded:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._offloaded.clear()
        self.zero.show()

    def _tensors(self, kinds: Collection[Kind]) -> Iterator[Tensor]:
        if "weights" in kinds:
            for unit in self.zero.units:
                for flat in unit.flats:
                    yield from (flat.full, flat.shard)
        for group in self.groups:
            if "masters" in kinds:
                yield from group.masters.beside()
            if "moments" in kinds:
                yield from group.moments()
            if "gradients" in kinds:
                yield from group.gradients.sum.tensors()
