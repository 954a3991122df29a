"""Phases add up what is there at the same time."""

from pipeline.budget.fit import Shortage, in_words, shortage
from pipeline.budget.machine import GIB, MIB, Machine
from pipeline.budget.table import Item, Phase, StepMemory

FORWARD, BACKWARD = frozenset({"forward"}), frozenset({"backward"})

TRAIN = Phase(
    "train",
    (
        Item("weights", "actor", 100),
        Item("weights", "critic", 10),
        Item("activations", "actor", 50, moments=FORWARD),
        Item("activations", "actor", 20, moments=BACKWARD),
        Item("gradients", "actor", 45, moments=BACKWARD),
        Item("moments", "actor", 70, place="host"),
    ),
)


def test_the_peak_is_of_one_moment_and_each_kind_has_its_own() -> None:
    assert TRAIN.peak("device") == 100 + 10 + 20 + 45
    assert TRAIN.by_kind("device") == {"weights": 110, "gradients": 45, "activations": 50}
    assert (TRAIN.peak("host"), TRAIN.peak("disk")) == (70, 0)


def test_a_phase_of_nothing_takes_nothing() -> None:
    assert (Phase("load", ()).peak("device"), Phase("load", ()).by_kind("device")) == (0, {})


def test_the_step_takes_what_its_worst_phase_takes() -> None:
    load = Phase("load", (Item("weights", "actor", 300),))

    assert StepMemory((load, TRAIN)).peak("device") == 300
    assert StepMemory((load, TRAIN)).peak("host") == 70


def test_what_grows_with_the_room_is_needed_at_its_least_alone() -> None:
    cache = Item("kv_cache", "actor", 640, least=10)
    generate = Phase("generate", (Item("weights", "actor", 100), cache))
    memory = StepMemory((generate,))

    assert generate.peak("device") == 740
    assert generate.least().peak("device") == 110
    assert shortage(memory, Machine(1, 1, 110, None)) is None
    assert shortage(memory, Machine(1, 1, 109, None)) == Shortage(
        generate, "each GPU", needed=110, there=109
    )


def test_processes_share_the_memory_of_their_machine() -> None:
    memory = StepMemory((TRAIN,))  # 175 where it computes, 70 beside it

    def short(machine: Machine) -> Shortage | None:
        return shortage(memory, machine)

    assert short(Machine(4, 8, 200, 4 * 70)) is None
    assert short(Machine(4, 8, 200, 4 * 70 - 1)) == Shortage(
        TRAIN, "each machine", needed=280, there=279
    )
    assert short(Machine(2, 2, None, 2 * 245)) is None  # without GPUs it is the same memory
    assert short(Machine(2, 2, None, 2 * 245 - 1)) is not None
    assert short(Machine(4, 8, 200, None)) is None


def test_of_phases_that_lack_the_one_that_lacks_most_is_named() -> None:
    phases = tuple(
        Phase(name, (Item("weights", "actor", size),))
        for name, size in (("load", 120), ("train", 150), ("score", 130))
    )
    short = shortage(StepMemory(phases), Machine(1, 1, 100, None))

    assert short is not None
    assert (short.phase.name, short.needed, short.there) == ("train", 150, 100)


def test_sizes_are_said_in_one_unit() -> None:
    assert in_words(3 * GIB, 512 * MIB) == ("3.0 GiB", "0.5 GiB")
    assert in_words(10 * MIB, 1536 * 1024) == ("10.0 MiB", "1.5 MiB")
