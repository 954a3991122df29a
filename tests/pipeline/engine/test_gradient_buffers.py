"""Gradients lie in the weights' own type where that rounds nothing, and reductions wait late."""

import time

import pytest
import torch
from torch import Tensor

from pipeline.config.zero import ZeroConfig
from pipeline.engine.collectives import make_collectives
from pipeline.engine.comm import tree_sum
from pipeline.engine.engine import Engine
from pipeline.parallel.mesh import current_mesh
from pipeline.parallel.rendezvous import MOST_AHEAD, SLOTS
from tests.distributed import rank, run_ranks
from tests.pipeline.engine.test_stages import build, loss_of, settings

CPU = torch.device("cpu")


def formats(tied: bool, kind: str) -> dict[str, set[torch.dtype]]:
    """Of the gradients of each unit, while autograd finds them."""
    model = build("llama", "bf16", tie_word_embeddings=tied)
    engine = Engine(model, settings(2, max_norm=None), total_steps=2)
    found: dict[str, set[torch.dtype]] = {unit.name: set() for unit in engine.zero.units}
    for unit in engine.zero.units:
        for each in unit.trained:
            for param in each.flat.params.values():
                param.register_post_accumulate_grad_hook(
                    lambda param, name=unit.name: found[name].add(param.grad.dtype)
                )
    loss = loss_of(engine, 0, 0, rank())
    if kind == "no_sync":
        with engine.no_sync():
            engine.backward(loss)
    elif kind == "by itself":
        loss.backward()
    elif kind == "twice in a block":
        engine.backward(loss + model.model.layers[0].mlp.up_proj.weight.float().sum())
    else:
        engine.backward(loss)
    engine.step()
    return found


NARROW, WIDE = {torch.bfloat16}, {torch.float32}


@pytest.mark.parametrize(
    ("kind", "tied", "expected"),
    [
        ("plain", False, [NARROW] * 5),
        ("plain", True, [NARROW, NARROW, WIDE | NARROW]),
        ("twice in a block", False, [NARROW, WIDE, NARROW, NARROW, NARROW]),
        ("no_sync", False, [WIDE] * 5),
        ("by itself", False, [WIDE] * 5),
    ],
)
def test_a_weight_with_one_gradient_has_it_in_its_own_type(
    kind: str, *, tied: bool, expected: list[set[torch.dtype]]
) -> None:
    # Each vector decides for itself: a block has one, norms included, the root one for a module.
    for found in run_ranks(formats, tied, kind):
        blocks = ["model.layers.0", "model.layers.1"]
        own = blocks if tied else ["model.embed_tokens", *blocks, "lm_head"]
        assert list(found) == [*own, "root"]
        assert list(found.values()) == expected


def gradients(stage: int, shared_memory: bool) -> list[dict[str, Tensor]]:
    """Of passes in which the processes differ; through gloo all are fp32."""
    model = build("llama", "bf16")
    config = settings(stage, max_norm=None, shared_memory=shared_memory)
    engine = Engine(model, config, total_steps=2)
    found: list[dict[str, Tensor]] = []
    for step in range(3):
        loss = loss_of(engine, step, 0, rank())
        if step == 0 and rank() == 1:
            head = model.lm_head.weight.float()
            loss = loss + 1e-3 * (head.square().sum() + head.exp().sum())
        if step == 1 and rank() == 0:
            loss = loss.detach()
        engine.backward(loss)
        engine.backward(loss_of(engine, step, 1, rank()))
        found.append(engine.gradients())
        engine.discard()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_processes_may_differ_in_the_types_of_their_gradients(stage: int) -> None:
    expected = run_ranks(gradients, stage, False)

    got = run_ranks(gradients, stage, True)

    for of_rank, plain in zip(got, expected, strict=True):
        for mine, theirs in zip(of_rank, plain, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_parts_below_fp32_are_added_in_fp32() -> None:
    # In bf16 256 + 1 is 256.
    parts = [torch.full((70_000,), 256.0).bfloat16(), torch.full((70_000,), 1.0).half()]
    out = torch.empty(70_000)

    tree_sum([*parts, torch.full((70_000,), 0.5)], out=out)

    assert (out == 257.5).all()


def late_sum() -> tuple[float, float, float, Tensor]:
    """When a reduction is asked for, under way, and its sum there; rank 1 comes late.

    All by the machine's one monotonic clock, so that the two processes' times compare.
    """
    comm = make_collectives(CPU, ZeroConfig(), current_mesh().data, name="model")
    full, out = comm.empty(64, torch.float32, CPU), torch.empty(32)
    full.fill_(rank() + 1.0)
    current_mesh().world.barrier()
    if rank() == 1:
        time.sleep(0.5)
    asked = time.monotonic()
    work = comm.reduce_scatter(full, out, "unit")
    announced = time.monotonic()
    work.wait()
    ended = time.monotonic()
    current_mesh().world.barrier()
    return asked, announced, ended, out


def test_a_reduction_waits_for_the_others_only_when_its_sum_is_needed() -> None:
    (_, announced, ended, out), (late, _, _, other) = run_ranks(late_sum)

    assert announced < late <= ended
    assert (out == 3).all()
    assert (other == 3).all()


def many_sums() -> list[float]:
    """More reductions at once than may be announced, with a gather between."""
    comm = make_collectives(CPU, ZeroConfig(), current_mesh().data, name="model")
    number = 3 * SLOTS
    fulls = [comm.empty(64, torch.float32, CPU).fill_(n + rank()) for n in range(number)]
    outs = [torch.empty(32) for _ in fulls]
    works = []
    for n, (full, out) in enumerate(zip(fulls, outs, strict=True)):
        works.append(comm.reduce_scatter(full, out, f"unit {n}"))
        if n == MOST_AHEAD // 2:
            assert not comm.has_been_read(comm.rendezvous - 1)
            comm.meet()
            assert comm.has_been_read(comm.rendezvous - 1)
    for work in reversed(works):
        work.wait()
        work.wait()
    current_mesh().world.barrier()
    return [out[0].item() for out in outs]


def test_many_reductions_may_be_under_way() -> None:
    expected = [2.0 * n + 1 for n in range(3 * SLOTS)]

    assert run_ranks(many_sums) == [expected, expected]
