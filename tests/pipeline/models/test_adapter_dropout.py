"""The masks of adapters' dropout hang on the run, the layer and the pass alone."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.models.adapter_dropout import (
    AdapterDropout,
    masks_again,
    masks_of,
    masks_of_part,
)
from pipeline.parallel.shards import Shard, ShardSpec

ONES = torch.ones(5, 40)


def mask(*number: int, seed: int = 7, name: str = "layers.0.q", times: int = 1) -> Tensor:
    """What is left of ones in a pass, of the last of so many calls."""
    layer = AdapterDropout(0.25, seed=seed, name=name)
    with masks_of(*number):
        return [layer(ONES) for _ in range(times)][-1]


def test_each_run_layer_pass_and_call_has_a_mask_of_its_own_and_always_the_same() -> None:
    masks = [
        mask(0, 1, 2),
        mask(0, 1, 3),
        mask(1, 1, 2),
        mask(0, 1, 2, seed=8),
        mask(0, 1, 2, name="layers.1.q"),
        mask(0, 1, 2, times=2),
    ]

    assert torch.equal(mask(0, 1, 2), masks[0])
    assert len({tuple(each.flatten().tolist()) for each in masks}) == len(masks)
    assert {*masks[0].unique().tolist()} == {0.0, torch.tensor(1 / 0.75).item()}
    dropped = torch.stack(masks).eq(0).float().mean()
    assert 0.2 < dropped < 0.3  # of 1,200 elements, a quarter, give or take four deviations


def test_processes_take_their_columns_of_the_mask_of_all() -> None:
    halves = (ShardSpec(0, (Shard(0, 10), Shard(20, 30))), ShardSpec(0, (Shard(10, 20),)))

    for own in halves:
        layer = AdapterDropout(0.25, seed=7, name="layers.0.q")
        layer.divide(40, (own,))
        columns = replace(own, dim=1)
        with masks_of(0, 1, 2):
            assert torch.equal(layer(columns.of(ONES)), columns.of(mask(0, 1, 2)))


def test_parts_of_one_process_draw_the_same_mask_and_take_their_columns_of_it() -> None:
    halves = tuple(ShardSpec(0, (Shard(first, first + 20),)) for first in (0, 20))
    layer = AdapterDropout(0.25, seed=7, name="layers.0.q")
    layer.divide(40, halves)
    calls: list[Tensor] = []

    with masks_of(0, 1, 2):
        for _ in range(2):  # groups of padded rows
            found: list[Tensor] = []
            for at, own in enumerate(halves):
                with masks_of_part(at):
                    found.append(layer(replace(own, dim=1).of(ONES)))
            calls.append(torch.cat(found, dim=1))

    assert torch.equal(calls[0], mask(0, 1, 2))
    assert torch.equal(calls[1], mask(0, 1, 2, times=2))


def test_a_block_that_is_run_again_draws_the_masks_of_its_first_run() -> None:
    layer = AdapterDropout(0.25, seed=7, name="layers.0.q")
    drawn: list[Tensor] = []

    def block(values: Tensor) -> Tensor:
        drawn.append(layer(ONES))
        return values * drawn[-1].sin()

    values = ONES.clone().requires_grad_()
    outputs: list[Tensor] = []
    for number in range(2):  # twice in a pass, as padded rows are, and among other passes
        with masks_of(number):
            outputs += [
                checkpoint(block, values, use_reentrant=False, context_fn=masks_again)
                for _ in range(2)
            ]
    first = drawn[:]
    for output in outputs:
        output.sum().backward()

    assert len(drawn) == 2 * len(first) == 8
    assert all(torch.equal(*pair) for pair in zip(first, drawn[4:], strict=True))
    assert not any(torch.equal(first[0], other) for other in first[1:])


def test_without_a_pass_masks_are_of_pytorchs_generator_and_evaluation_has_none() -> None:
    layer = AdapterDropout(0.25, seed=7, name="layers.0.q")
    torch.manual_seed(3)
    first, second = layer(ONES), layer(ONES)
    torch.manual_seed(3)

    assert torch.equal(layer(ONES), first)
    assert not torch.equal(first, second)
    assert torch.equal(layer.eval()(ONES), ONES)
