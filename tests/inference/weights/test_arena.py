"""Copies of weights are stored in blocks of bounded size, reused each time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inference.weights import replica as arena
from inference.weights.replica import Arena, InPlace, Place, Replica
from tests.families import tiny_causal_lm


def test_tensors_share_blocks_and_a_larger_one_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "BLOCK_BYTES", 256)
    found = Arena()

    places = [found.reserve(size) for size in (100, 60, 68, 500, 8, 256)]

    assert places == [
        Place(0, 0, 100),
        Place(0, 128, 60),
        Place(1, 0, 68),
        Place(2, 0, 500),
        Place(3, 0, 8),
        Place(4, 0, 256),
    ]
    assert found.num_bytes == 188 + 68 + 500 + 8 + 256


class Requests(TorchDispatchMode):
    """Sizes of the requested byte vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and result.dtype == torch.uint8:
            self.sizes.append(result.nbytes)
        return result


@contextmanager
def requests() -> Iterator[list[int]]:
    with Requests() as mode:
        yield mode.sizes


def test_a_replica_asks_for_the_same_blocks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "BLOCK_BYTES", 2**13)
    model = tiny_causal_lm("llama")
    largest = max(param.nbytes for param in model.parameters())
    replica = Replica(model, shares=False)

    asked: list[list[int]] = []
    for _ in range(2):
        with requests() as sizes:
            replica.load(InPlace(model))
        asked.append(sizes)
        for name, param in replica.model.named_parameters():
            assert torch.equal(param, model.get_parameter(name)), name
        replica.release()

    assert asked[0] == asked[1]
    assert sum(asked[0]) == replica.num_bytes
    assert len(asked[0]) > 3
    assert max(asked[0]) <= max(2**13, largest)
