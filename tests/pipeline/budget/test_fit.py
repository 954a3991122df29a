"""Memory of phases compared with that of a machine."""

from pipeline.budget.fit import Shortage, find_shortage
from pipeline.budget.machine import Machine
from pipeline.budget.memory import Item, Phase, StepMemory

TRAIN = Phase(
    "train",
    (
        Item("weights", 100),
        Item("weights", 10),
        Item("gradients", 65),
        Item("moments", 70, location="host"),
    ),
)


def test_adaptive_cache_requires_only_one_slot() -> None:
    cache = Item("kv_cache", 640, min_bytes=10)
    generate = Phase("generate", (Item("weights", 100), cache))
    memory = StepMemory((generate,))

    assert (generate.peak("device"), generate.at_minimum().peak("device")) == (740, 110)
    assert find_shortage(memory, Machine(1, 1, 110, None)) is None
    assert find_shortage(memory, Machine(1, 1, 109, None)) == Shortage(
        generate, "each GPU", needed=110, available=109
    )


def test_processes_share_the_memory_of_their_machine() -> None:
    memory = StepMemory((TRAIN,))  # 175 on the device, 70 next to it

    assert find_shortage(memory, Machine(4, 8, 200, 4 * 70)) is None
    assert find_shortage(memory, Machine(4, 8, 200, 4 * 70 - 1)) == Shortage(
        TRAIN, "each machine", needed=280, available=279
    )
    # Without GPUs, both are in host memory.
    assert find_shortage(memory, Machine(2, 2, None, 2 * 245)) is None
    assert find_shortage(memory, Machine(2, 2, None, 2 * 245 - 1)) is not None
