"""Processes of one machine hand each other tensors through memory as through torch's group."""

import threading
import time
from typing import Any

import pytest
import torch

from pipeline.parallel.futex import Futex
from pipeline.parallel.mesh import current_mesh, subgroup
from pipeline.parallel.neighbours import LETTER_BYTES, Neighbours, neighbours
from pipeline.position import DesyncError
from tests.distributed import run_ranks

SHAPES = ((0,), (3, 1), (3, 5, 7), (3, LETTER_BYTES // 8 + 5), (3, 2, LETTER_BYTES // 4))


def hand_over() -> dict[str, Any]:
    world = current_mesh().world
    plain = subgroup([world.ranks], timeout_seconds=60)
    near = neighbours(plain)
    unlike = list[str]()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for shape in SHAPES:
            draw = torch.Generator().manual_seed(world.rank)
            own = torch.randint(0, 100, shape, generator=draw).to(dtype)
            turned = own.transpose(0, -1)  # which doesn't lie in one piece
            for each in (own, turned):
                pairs = list(
                    zip(plain.gather(each, what="x"), near.gather(each, what="x"), strict=True)
                )
                if shape[0] == world.size:
                    parts = own.clone()
                    pairs += [(plain.exchange(parts, what="x"), near.exchange(parts, what="x"))]
                if not all(torch.equal(one, other) for one, other in pairs):
                    unlike.append(f"{dtype} {shape}")
    return {"near": isinstance(near, Neighbours), "unlike": unlike, "apart": type(near.apart)}


def meet_with_another_label() -> str:
    near = neighbours(current_mesh().world)
    what = "hidden states" if near.rank == 0 else "outputs"
    with pytest.raises(DesyncError) as raised:
        near.gather(torch.ones(2), what=what)
    return str(raised.value)


def test_three_processes_have_what_torchs_collectives_give() -> None:
    for each in run_ranks(hand_over, world_size=3):
        assert each == {"near": True, "unlike": [], "apart": Neighbours}


def test_processes_that_hand_over_different_things_are_named() -> None:
    first, second = run_ranks(meet_with_another_label)

    assert "rank 0 came to all_gather of hidden states, 8 bytes while rank 1 came to" in first
    assert "rank 1 came to all_gather of outputs, 8 bytes while rank 0 came to" in second


def test_a_futex_wakes_who_waits_for_its_number() -> None:
    memory = memoryview(bytearray(8))
    number, futex = memory.cast("q"), Futex(memory)
    woken = list[bool]()

    assert futex.wait(1, seconds=60)  # which it isn't: at once
    assert not futex.wait(0, seconds=0.001)
    waiting = threading.Thread(target=lambda: woken.append(futex.wait(0, seconds=60)))
    waiting.start()
    while waiting.is_alive():
        number[0] = 1
        futex.wake()
        time.sleep(0.001)
    assert woken == [True]


def test_a_process_that_sleeps_takes_no_processor_time() -> None:
    memory = memoryview(bytearray(8))
    before = time.process_time()

    assert not Futex(memory).wait(0, seconds=0.2)
    assert time.process_time() - before < 0.1
