"""Phases against the memory of a machine."""

from dataclasses import replace

from pipeline.budget.fit import Shortage, in_words, left_out, line, shortage, table
from pipeline.budget.machine import GIB, MIB, Machine
from pipeline.budget.memory import Item, Phase, StepMemory

TRAIN = Phase(
    "train",
    (
        Item("weights", "actor", 100),
        Item("weights", "critic", 10),
        Item("gradients", "actor", 65),
        Item("moments", "actor", 70, place="host"),
    ),
)


def test_kinds_and_places_add_up() -> None:
    assert (TRAIN.peak("device"), TRAIN.peak("host"), TRAIN.peak("disk")) == (175, 70, 0)
    assert TRAIN.by_kind("device") == {"weights": 110, "gradients": 65}
    assert TRAIN.weights("device") == {"actor": 100, "critic": 10}


def test_the_table_has_a_row_for_each_kind_and_role() -> None:
    load = Phase("load", (Item("weights", "actor", 3 * MIB), Item("weights", "reward", 2 * MIB)))
    memory = StepMemory((load, TRAIN), parameters={"actor": 9, "critic": 1, "reward": 5})
    lines = [each.split() for each in table(memory, Machine(1, 1, None, None))]

    assert ["weights", "5.0", "0.0"] in lines
    assert ["reward", "2.0", "0.0"] in lines
    assert ["in", "all", "5.0", "0.0"] in lines


def test_optional_phases_refuse_nothing() -> None:
    compare = Phase("compare", (Item("weights", "base", 400 * MIB),), optional=True)
    memory = StepMemory((TRAIN, compare), parameters={"base": 9})
    machine = Machine(1, 1, 300 * MIB, None)

    assert shortage(memory, machine) is None
    assert list(left_out(memory, machine)) == [
        Shortage(compare, "each GPU", needed=400 * MIB, available=300 * MIB)
    ]
    assert not list(left_out(memory, replace(machine, gpu_bytes=400 * MIB)))
    assert line(memory, machine).endswith("on each GPU (to train), 0.0 MiB of main memory")


def test_an_adaptive_cache_needs_one_slot() -> None:
    cache = Item("kv_cache", "actor", 640, least=10)
    generate = Phase("generate", (Item("weights", "actor", 100), cache))
    memory = StepMemory((generate,))

    assert (generate.peak("device"), generate.least().peak("device")) == (740, 110)
    assert shortage(memory, Machine(1, 1, 110, None)) is None
    assert shortage(memory, Machine(1, 1, 109, None)) == Shortage(
        generate, "each GPU", needed=110, available=109
    )


def test_processes_share_the_memory_of_their_machine() -> None:
    memory = StepMemory((TRAIN,))  # 175 on the device, 70 next to it

    assert shortage(memory, Machine(4, 8, 200, 4 * 70)) is None
    assert shortage(memory, Machine(4, 8, 200, 4 * 70 - 1)) == Shortage(
        TRAIN, "each machine", needed=280, available=279
    )
    assert shortage(memory, Machine(2, 2, None, 2 * 245)) is None  # without GPUs it is the same
    assert shortage(memory, Machine(2, 2, None, 2 * 245 - 1)) is not None


def test_the_phase_that_lacks_most_is_named() -> None:
    sizes = {"load": 120, "train": 150, "score": 130}
    phases = tuple(Phase(n, (Item("weights", "actor", s),)) for n, s in sizes.items())  # type: ignore[arg-type]
    short = shortage(StepMemory(phases), Machine(1, 1, 100, None))

    assert short is not None
    assert (short.phase.name, short.needed, short.available) == ("train", 150, 100)


def test_sizes_have_one_unit() -> None:
    assert in_words(3 * GIB, 512 * MIB) == ("3.0 GiB", "0.5 GiB")
    assert in_words(10 * MIB, 1536 * 1024) == ("10.0 MiB", "1.5 MiB")
