from collections.abc import Mapping
from dataclasses import replace

import pytest

from pipeline.launch.findings import problems, table
from pipeline.launch.hosts import Host
from pipeline.launch.layout import Layout
from pipeline.launch.probe import Gpu, Machine

HOSTS = (Host("a", (0, 1), "hosts:1"), Host("b", (0, 1), "hosts:2"))
WHERE = Layout("ssh", HOSTS, 2, "a", 29500)
GPU = Gpu("H200", 143_360, 500)
FINE = Machine(
    host="x",
    python="3.11.7",
    packages={"torch": "2.13.0", "transformers": "5.23.0"},
    code="abc",
    time=0.0,
    disk_bytes=2**40,
    memory_bytes=2**38,
    gpus=[GPU, GPU],
    shared="word",
    own_address="10.0.0.2",
    reaches=True,
    port=None,
)


def found(second: Machine, *, first: Machine = FINE, clock: float = 0.0) -> list[str]:
    machines: Mapping[Host, Machine] = {HOSTS[0]: first, HOSTS[1]: second}
    clocks = {HOSTS[0]: 0.0, HOSTS[1]: clock}
    return problems(machines, WHERE, mark="word", directory="/out", clocks=clocks)


def test_machines_that_are_alike_have_no_problem() -> None:
    assert found(FINE, clock=20) == []


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (
            replace(FINE, python="3.12.1"),
            "Python is 3.12.1 on b and 3.11.7 on a; install the same on all machines",
        ),
        (
            replace(FINE, packages={"torch": "2.13.0", "transformers": "5.20.0"}),
            "transformers is 5.20.0 on b and 5.23.0 on a; install the same on all machines",
        ),
        (
            replace(FINE, code="abd"),
            "the code of this repository on b is not that on a; check out the same commit,"
            " without changes, on all machines",
        ),
        (
            replace(FINE, gpus=[GPU]),
            "b has 1 GPUs, and slot 1 is asked for (hosts:2); correct its slots, or check its"
            " driver with nvidia-smi",
        ),
        (
            replace(FINE, gpus=[GPU, Gpu("H200", 143_360, 30_720)]),
            "GPU 1 of b has 30.0 of 140 GiB in use; end that job, or leave the GPU out with"
            " --exclude b:1",
        ),
        (
            replace(FINE, shared=None),
            "b does not see this machine's /out; put --output-dir on a file system that all"
            " machines share, at the same path",
        ),
        (
            replace(FINE, disk_bytes=300 * 2**20),
            "/out has 300 MiB free on b; make room, or choose another --output-dir",
        ),
        (
            replace(FINE, own_address=None, reaches=False),
            "b does not know the name a, or has no way to it; give --master-addr, an address of a"
            " that all machines reach",
        ),
        (
            replace(FINE, own_address="127.0.0.1"),
            "on b the name a means b itself; correct its /etc/hosts, or give --master-addr, an"
            " address of a",
        ),
        (
            replace(FINE, reaches=False),
            "b can't reach port 29500 of a; open it and the ports above 1024 between the machines,"
            " or give another --master-port or --master-addr",
        ),
    ],
)
def test_what_stands_in_the_way_is_one_sentence_with_its_mend(
    second: Machine, sentence: str
) -> None:
    assert found(second) == [sentence]


@pytest.mark.parametrize(("clock", "words"), [(90, "90 s ahead"), (-45, "45 s behind")])
def test_a_clock_that_is_wrong_is_named(clock: float, words: str) -> None:
    assert found(FINE, clock=clock) == [
        f"the clock of b is {words}; set it, with NTP on all machines"
    ]


def test_machines_without_gpus_run_on_their_cpus() -> None:
    bare = replace(FINE, gpus=[])

    assert found(bare, first=bare) == []


def test_the_machines_stand_side_by_side() -> None:
    rows = table({HOSTS[0]: FINE}, {HOSTS[0]: -2.0})

    assert rows[1].split() == [
        *("a", "3.11.7", "2.13.0", "2", "2", "x", "H200,", "140", "GiB"),
        *("256", "GiB", "1024", "GiB", "-2", "s"),
    ]
