"""Nodes that can't rendezvous time out with one sentence and exit code 2."""

import socket

import pytest

from tests.faults.jobs import Command, free_port

TORCHRUN = ("-m", "pipeline.launch.torchrun", "--nproc-per-node", "1", "--nnodes", "2")
STEP = ("-m", "step1_sft.train", "--output-dir", "/nowhere")


@pytest.mark.faults
def test_occupied_rendezvous_port_is_named() -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = str(server.getsockname()[1])
        rendezvous = ("--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port)
        with Command(*TORCHRUN, *rendezvous, *STEP) as job:
            assert job.wait(60) == 2, job.output()
            output = job.output()

    assert output == (
        f"error: the nodes could not rendezvous at --master-addr 127.0.0.1 --master-port {port}:"
        " the port is in use by another program; choose another\n"
    )


@pytest.mark.faults
@pytest.mark.parametrize(
    "rendezvous",
    [
        ("--node-rank", "1", "--master-addr", "127.0.0.1", "--rdzv-conf", "timeout=3"),
        ("--node-rank", "0", "--master-addr", "127.0.0.1", "--rdzv-conf", "timeout=3"),
    ],
    ids=["no first node", "no second node"],
)
def test_missing_node_makes_the_others_time_out(rendezvous: tuple[str, ...]) -> None:
    port = free_port()
    with Command(*TORCHRUN, *rendezvous, "--master-port", str(port), *STEP) as job:
        assert job.wait(60) == 2, job.output()
        output = job.output().splitlines()[-1]

    assert output.startswith(
        f"error: the nodes could not rendezvous at --master-addr 127.0.0.1 --master-port {port}: "
    )
    assert output.endswith(
        "every node needs the first node's address, a port that is free and reachable there, and"
        " a different --node-rank"
    )
