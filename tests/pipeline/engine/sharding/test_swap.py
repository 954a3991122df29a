"""Optimizer state that is streamed from disk matches state in memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.engine.sharding.offload import StreamedState, TensorStore
from tests.slow_disk import slow_down_writes

SIZES = [1, 4097, 0, 1000, 4096, 7, 2500]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    store = TensorStore(tmp_path, rank=0, threads=8)
    yield store
    store.close()


def random_state(size: int, *, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=generator).abs() for _ in range(3))


def make_state(store: TensorStore) -> tuple[StreamedState, list[tuple[Tensor, ...]]]:
    """Return a state on disk, and the same state in memory."""
    streamed = StreamedState(store, SIZES)
    in_memory = [random_state(size, seed=group) for group, size in enumerate(SIZES)]
    for group, tensors in enumerate(in_memory):
        streamed.write(group, tensors)
    return streamed, in_memory


def adamw_step(tensors: tuple[Tensor, ...], gradient: Tensor, step: int) -> None:
    """Take one fused AdamW step, in place."""
    master, exp_avg, exp_avg_sq = tensors
    param = torch.nn.Parameter(master)
    param.grad = gradient
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    optimizer.state[param] = {
        "step": torch.tensor(float(step)),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    optimizer.step()


@pytest.mark.parametrize("seconds", [0.0, 0.01], ids=["a disk", "a slow disk"])
def test_steps_on_streamed_state_match_steps_in_memory_bitwise(
    seconds: float, store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed, in_memory = make_state(store)
    slow_down_writes(monkeypatch, seconds=seconds)

    for step in range(3):
        order = range(len(SIZES)) if step % 2 == 0 else reversed(range(len(SIZES)))
        for group, tensors in streamed.stream(list(order)):
            gradient = random_state(SIZES[group], seed=100 * step + group)[0]
            adamw_step(tensors, gradient, step)
            adamw_step(in_memory[group], gradient, step)

    groups = []
    for group, tensors in streamed.stream(range(len(SIZES))):
        groups.append(group)
        assert all(map(torch.equal, tensors, in_memory[group]))
    assert groups == list(range(len(SIZES)))
    assert not torch.equal(in_memory[1][0], random_state(4097, seed=1)[0])


def test_group_whose_step_fails_is_unchanged(store: TensorStore) -> None:
    streamed, in_memory = make_state(store)

    def fail_at_the_second_group() -> None:
        for index, (_, tensors) in enumerate(streamed.stream([0, 1, 3])):
            tensors[0].fill_(-1.0)
            if index == 1:
                raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        fail_at_the_second_group()

    masters = {group: tensors[0].clone() for group, tensors in streamed.stream([0, 1, 3])}
    assert masters[0].tolist() == [-1.0]
    assert torch.equal(masters[1], in_memory[1][0])
    assert torch.equal(masters[3], in_memory[3][0])
