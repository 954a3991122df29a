"""Sums over virtual parts are the tree that as many processes would add, whoever has the parts."""

from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.parallel.group import ALONE
from pipeline.parallel.mesh import current_mesh
from pipeline.parallel.shards import Shard, ShardSpec
from pipeline.parallel.virtual_parts import (
    VirtualParts,
    add_parts,
    cut_weight,
    ending_product,
    feed_parts,
    join_parts,
    share_weights,
    split_columns,
)
from tests.distributed import run_ranks

FOUR = VirtualParts(4, ALONE)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tree(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return ((a.float() + b.float()) + (c.float() + d.float())).to(a.dtype)


def totals(dtype: torch.dtype) -> Tensor:
    """The sum of four parts' numbers, of which each process has its share."""
    parts = VirtualParts(4, current_mesh().world)
    return parts.total([drawn(64, seed=number, dtype=dtype) for number in parts.own], "a test")


def test_a_sum_is_a_tree_that_is_rounded_once_whoever_has_the_parts() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        of_parts = [drawn(64, seed=number, dtype=dtype) for number in range(4)]
        expected = tree(*of_parts)

        assert torch.equal(totals(dtype), expected)
        assert all(torch.equal(each, expected) for each in run_ranks(totals, dtype))
    a, b, c, d = (drawn(64, seed=number) for number in range(4))
    assert not torch.equal(a + b + c + d, tree(a, b, c, d))


def test_what_parts_read_and_find_goes_forth_and_back_as_the_same_tree() -> None:
    read, weights = drawn(3, 5).requires_grad_(), [drawn(3, 5, seed=n) for n in range(1, 5)]

    found = [each * weight for each, weight in zip(feed_parts(read, FOUR), weights, strict=True)]
    added = add_parts(found, FOUR)
    added.backward(drawn(3, 5, seed=9))

    assert torch.equal(added, tree(*(read * weight for weight in weights)))
    assert read.grad is not None
    assert torch.equal(read.grad, tree(*(drawn(3, 5, seed=9) * weight for weight in weights)))


def test_a_weight_is_cut_where_its_parts_lie_and_gets_one_gradient() -> None:
    weight = drawn(8, 3).requires_grad_()
    # Queries and values of four parts, packed: rows 0 to 3 and 4 to 7.
    pieces = [ShardSpec(0, (Shard(n, n + 1), Shard(4 + n, 5 + n))) for n in range(4)]
    gradients = [drawn(2, 3, seed=n) for n in range(1, 5)]

    torch.autograd.backward(cut_weight(weight, pieces), gradients)

    assert torch.equal(cut_weight(weight, pieces)[2], weight[[2, 6]])
    assert weight.grad is not None
    for number, gradient in enumerate(gradients):
        assert torch.equal(weight.grad[[number, 4 + number]], gradient)


def test_whole_weights_get_the_sum_of_what_the_parts_find_in_one_collective() -> None:
    weights = [drawn(n, seed=n, dtype=torch.bfloat16).requires_grad_() for n in (3, 5)]
    by_part = share_weights(weights, FOUR)
    found = [[drawn(n, seed=10 * n + at, dtype=torch.bfloat16) for n in (3, 5)] for at in range(4)]

    torch.autograd.backward([*chain(*by_part)], [*chain(*found)])

    for at, weight in enumerate(weights):
        assert all(torch.equal(part[at], weight) for part in by_part)
        assert weight.grad is not None
        assert torch.equal(weight.grad, tree(*(each[at] for each in found)))


def test_columns_are_computed_with_as_they_lie_on_a_process_of_its_own() -> None:
    values, whole = drawn(6, 16).requires_grad_(), drawn(10, 16, seed=1).requires_grad_()
    gradient = drawn(6, 10, seed=2)
    pieces = [ShardSpec(1, (Shard(4 * n, 4 * n + 4),)) for n in range(4)]

    split = split_columns(values, FOUR)
    found = [
        ending_product(each, weight, is_turned=False)
        for each, weight in zip(split, cut_weight(whole, pieces), strict=True)
    ]
    add_parts(found, FOUR).backward(gradient)

    assert values.grad is not None
    assert whole.grad is not None
    for number in range(4):
        place = slice(4 * number, 4 * number + 4)
        own = [each[:, place].detach().clone().requires_grad_() for each in (values, whole)]
        alone = F.linear(*own)
        alone.backward(gradient)
        assert torch.equal(found[number], alone)
        assert own[0].grad is not None
        assert own[1].grad is not None
        assert torch.equal(values.grad[:, place], own[0].grad)
        assert torch.equal(whole.grad[:, place], own[1].grad)
    turned = cut_weight(whole, pieces)[1].t()  # as that of a Conv1D
    alone = F.linear(split[1], turned.contiguous().t())
    assert torch.equal(ending_product(split[1], turned, is_turned=True), alone)


def test_outputs_lie_side_by_side_and_each_part_goes_back_by_its_own() -> None:
    parts = [drawn(2, 3, seed=n).requires_grad_() for n in range(4)]

    joined = join_parts(parts, FOUR)
    joined.backward(drawn(2, 12, seed=9))

    assert torch.equal(joined, torch.cat(parts, dim=-1))
    for number, part in enumerate(parts):
        assert part.grad is not None
        assert torch.equal(part.grad, drawn(2, 12, seed=9)[:, 3 * number : 3 * number + 3])
