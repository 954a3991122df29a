"""Phases add up what is there at the same time."""

from dataclasses import replace

from pipeline.budget.fit import Shortage, in_words, left_out, shortage
from pipeline.budget.machine import GIB, MIB, Machine
from pipeline.budget.table import Item, Phase, StepMemory
from pipeline.budget.text import line, table

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


def test_weights_are_shown_by_role_where_several_models_have_some() -> None:
    def rows(memory: StepMemory) -> list[list[str]]:
        lines = list(table(memory, Machine(1, 1, None, None)))
        return [line.split() for line in lines[lines.index(next(filter(_is_head, lines))) :]]

    load = Phase(
        "load",
        (
            Item("weights", "actor", 3 * MIB, moments=FORWARD),
            Item("weights", "reward", 2 * MIB, moments=BACKWARD),
        ),
    )
    both = rows(StepMemory((load, TRAIN), parameters={"actor": 9, "critic": 1, "reward": 5}))

    assert both[1:4] == [
        ["weights", "3.0", "0.0"],
        ["actor", "3.0", "0.0"],
        ["critic", "0.0", "0.0"],
    ]
    assert TRAIN.weights("device") == {"actor": 100, "critic": 10}
    assert rows(StepMemory((load,), parameters={"actor": 9}))[2][0] == "at"


def test_what_may_be_left_out_refuses_nothing() -> None:
    base = Item("weights", "base", 400 * MIB)
    compare = Phase("compare", (base,), optional=True)
    memory = StepMemory((TRAIN, compare), parameters={"base": 9})
    machine = Machine(1, 1, 300 * MIB, None)

    assert shortage(memory, machine) is None
    assert list(left_out(memory, machine)) == [
        Shortage(compare, "each GPU", needed=400 * MIB, there=300 * MIB)
    ]
    assert not list(left_out(memory, replace(machine, gpu_bytes=400 * MIB)))
    assert (
        "  the comparison with the base model is left out: it takes 400.0 MiB on each GPU to"
        " compare, and there are 300.0 MiB"
    ) in table(memory, machine)
    assert line(memory, machine).endswith("on each GPU (to train), 0.0 MiB of main memory")


def _is_head(line: str) -> bool:
    return line.startswith("  MiB")


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
        TRAIN, "each machine", needed=280, there=279, of_devices=False
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
