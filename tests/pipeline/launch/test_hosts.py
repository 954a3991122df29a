from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.hosts import Host, read_hostfile, select_hosts


def hosts(**slots: int) -> list[Host]:
    """worker_0=4 is worker-0 with four slots."""
    return [
        Host(name.replace("_", "-"), tuple(range(count)), f"hosts:{line}")
        for line, (name, count) in enumerate(slots.items(), start=1)
    ]


TWO = hosts(worker_0=4, worker_1=4)


def test_a_file_names_hosts_with_slots(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# my cluster\n\nworker-0 slots=2\n  ann@10.0.0.7\tslots=1  # the old one\n")

    assert read_hostfile(file) == [
        Host("worker-0", (0, 1), f"{file}:3"),
        Host("ann@10.0.0.7", (0,), f"{file}:4"),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a slots=1\nb", "{}:2: b has no slots; a line is `worker-0 slots=8`"),
        ("a slots=four", "{}:1: slots=four of a is not a whole number; a line is"),
        ("a slots=", "{}:1: slots= of a is not a whole number"),
        ("a 8", "{}:1: '8' after a is not understood; a line is"),
        ("a slots=8 max=9", "{}:1: 'max=9' after slots=8 is not understood"),
        ("a slots=0", "{}:1: a has slots=0; leave the line out"),
        ("// hosts of the lab\na slots=1", "{}:1: comments begin with #, not //"),
        ("-oProxyCommand=x slots=1", "{}:1: -oProxyCommand=x is not a name of a host"),
        ("a;rm slots=1", "{}:1: a;rm is not a name of a host"),
        (
            "a slots=1\nb slots=2\na slots=3",
            "{}:3: a stands in line 1 already; name each host once, with all its slots",
        ),
        ("# nothing\n", "--hostfile {} names no host; a line is `worker-0 slots=8`"),
    ],
)
def test_a_mistake_in_a_file_is_named_by_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)

    with pytest.raises(ConfigError) as error:
        read_hostfile(file)

    assert str(error.value).startswith(sentence.format(file))


def test_a_file_that_isnt_there_is_named() -> None:
    with pytest.raises(ConfigError, match="--hostfile nowhere: no such file"):
        read_hostfile(Path("nowhere"))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1, 2, 3)}),
        ({"include": "worker-1"}, {"worker-1": (0, 1, 2, 3)}),
        ({"include": "worker-0@worker-1:0,2"}, {"worker-0": (0, 1, 2, 3), "worker-1": (0, 2)}),
        ({"include": "worker-1:2,0@worker-0:1"}, {"worker-0": (1,), "worker-1": (0, 2)}),
        ({"include": "worker-1:1-3"}, {"worker-1": (1, 2, 3)}),
        ({"exclude": "worker-0"}, {"worker-1": (0, 1, 2, 3)}),
        ({"exclude": "worker-1:0"}, {"worker-0": (0, 1, 2, 3), "worker-1": (1, 2, 3)}),
        ({"exclude": "worker-1:0-3"}, {"worker-0": (0, 1, 2, 3)}),
        ({"num_nodes": 1}, {"worker-0": (0, 1, 2, 3)}),
        ({"num_gpus": 2}, {"worker-0": (0, 1), "worker-1": (0, 1)}),
    ],
)
def test_options_leave_hosts_and_slots(
    options: dict[str, int | str], left: dict[str, tuple[int, ...]]
) -> None:
    found = select_hosts(TWO, **options)  # type: ignore[arg-type]

    assert {host.name: host.slots for host in found} == left


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"include": "worker-2"},
            "--include worker-2: no host is called worker-2; did you mean worker-1?",
        ),
        (
            {"include": "worker-0:4"},
            "--include worker-0:4: worker-0 has no slot 4, only 0-3 (hosts:1)",
        ),
        ({"include": "worker-0:x"}, "--include worker-0:x: 'x' is not a slot; slots are numbers"),
        ({"include": "worker-0:"}, "--include worker-0:: worker-0: between two @ names no host"),
        ({"include": "worker-0@"}, "--include worker-0@: nothing between two @ names no host"),
        ({"include": "worker-0:3-1"}, "--include worker-0:3-1: 3-1 runs backwards"),
        (
            {"exclude": "worker-0:1@worker-0:2"},
            "--exclude worker-0:1@worker-0:2: worker-0 is named twice; give all its slots at once",
        ),
        ({"exclude": "worker-0@worker-1"}, "--exclude worker-0@worker-1 leaves no host"),
        ({"num_nodes": 3}, "--num-nodes 3 is more than the 2 hosts"),
        ({"num_gpus": 5}, "--num-gpus 5 is more than the 4 slots of worker-0 (hosts:1)"),
    ],
)
def test_what_is_not_there_is_named(options: dict[str, int | str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        select_hosts(TWO, **options)  # type: ignore[arg-type]

    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(("slots", "whole"), [((0, 1), True), ((1,), False), ((0, 2), False)])
def test_a_host_is_whole_if_no_device_has_to_be_hidden(slots: tuple[int, ...], whole: bool) -> None:
    assert Host("a", slots).is_whole == whole
