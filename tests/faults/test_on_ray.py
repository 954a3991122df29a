"""Steps on a Ray cluster of two nodes, both on this machine."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.test_many_machines import finish, read_weights, run_train, wait_for_checkpoint

pytest.importorskip("ray")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
MORE_STEPS = ("--reward.max_steps", "40", "--ppo.max_steps", "6", "--save-every", "2")
RAY = ("--deployment-type", "ray", *MORE_STEPS)
SINGLE = ("--deployment-type", "single_node", "--num-processes", "2", *MORE_STEPS)
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(**NODE)
    cluster.add_node(**NODE)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def test_run_with_a_lost_node_and_an_interrupt_matches_one_machine(
    tmp_path: Path, cluster: Any
) -> None:
    out = tmp_path / "ray"
    with run_train(out, *RAY) as job:
        wait_for_checkpoint(out, job, "step2_reward")
        (node,) = cluster.worker_nodes
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [*raylet.children(recursive=True), raylet]:
            process.kill()
        assert job.wait(200) == 1, job.output()
        assert "the node was lost; --resume continues" in job.output()
    cluster.add_node(**NODE)
    with run_train(out, *RAY, "--resume") as job:
        wait_for_checkpoint(out, job, "step3_ppo")
        job.process.send_signal(signal.SIGINT)
        assert job.wait(200) == 130, job.output()
    output = finish(run_train(out, *RAY, "--resume"), seconds=600)
    finish(run_train(tmp_path / "one", *SINGLE), seconds=600)

    assert "node 0 (" in output
    assert read_weights(out) == read_weights(tmp_path / "one")
    assert len(read_weights(out)) >= 4
