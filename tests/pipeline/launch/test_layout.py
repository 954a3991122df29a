from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.deployment import Deployment
from pipeline.launch.layout import expand_nodelist, layout

MANY = "multi_node"
SLURM = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "a[1-3]", "SLURM_GPUS_ON_NODE": "gpu:4"}


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("ann@worker-0 slots=4\nworker-1 slots=2\n")
    return file


def test_one_process_by_default() -> None:
    where = layout(Deployment(), {})

    assert (where.by, where.processes, str(where)) == ("process", None, "1 process each")


def test_one_process_per_gpu_of_one_machine() -> None:
    where = layout(Deployment(deployment_type="single_node"), {})

    assert (where.by, where.processes, str(where)) == ("node", 2, "2 processes each")


def test_machines_of_a_file_meet_at_the_first_one(hostfile: Path) -> None:
    where = layout(Deployment(deployment_type=MANY, hostfile=hostfile), SLURM)

    assert (where.by, where.address, where.port) == ("ssh", "worker-0", 29500)
    assert (where.processes, str(where)) == (6, "6 processes each on 2 machines")
    assert not where.is_elastic


def test_the_fewest_machines_are_those_with_which_a_job_goes_on(hostfile: Path) -> None:
    where = layout(Deployment(deployment_type=MANY, hostfile=hostfile, min_nodes=1), {})

    assert (where.fewest, len(where.hosts), where.is_elastic) == (1, 2, True)


def test_inside_of_an_allocation_its_machines_are_used() -> None:
    where = layout(Deployment(deployment_type=MANY), SLURM)

    assert (where.by, where.address, where.port) == ("slurm", "a1", 29505)
    assert [(host.name, len(host.slots)) for host in where.hosts] == [
        ("a1", 4),
        ("a2", 4),
        ("a3", 4),
    ]


def test_by_hand_each_machine_is_told_its_number() -> None:
    where = layout(
        Deployment(deployment_type=MANY, node_rank=1, num_nodes=2, master_addr="h", master_port=7),
        SLURM,
    )

    assert (where.by, where.address, where.port, where.processes) == ("hand", "h", 7, 4)


def test_by_hand_a_host_file_says_the_rest(hostfile: Path) -> None:
    where = layout(Deployment(deployment_type=MANY, node_rank=1, hostfile=hostfile), {})

    assert (where.by, where.address, where.processes) == ("hand", "worker-0", 6)


def test_localhost_is_refused_beside_others(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("worker-1 slots=1\nlocalhost slots=1\n")

    with pytest.raises(ConfigError, match=rf"^{file}:2: localhost is another machine for every"):
        layout(Deployment(deployment_type=MANY, hostfile=file), {})


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        ({}, {}, "--deployment-type multi_node needs --hostfile FILE, or a SLURM allocation, or"),
        ({"node_rank": 0}, {}, "--node-rank needs --num-nodes, how many machines there are"),
        ({"node_rank": 0, "num_nodes": 2}, {}, "--node-rank needs --master-addr, of machine 0"),
        (
            {"node_rank": 2, "num_nodes": 2, "master_addr": "a"},
            {},
            "--node-rank must be from 0 to 1, one for each machine, got 2",
        ),
        ({"include": "a1"}, SLURM, "--include needs --hostfile; SLURM has its own --nodelist"),
        ({"min_nodes": 4}, SLURM, "--min-nodes 4 is more than the 3 there are"),
        ({"num_nodes": 4}, SLURM, "--num-nodes 4 is more than the 3 of the allocation"),
    ],
)
def test_what_is_missing_is_named(
    options: dict[str, object], environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        layout(Deployment(deployment_type=MANY, **options), environment)  # type: ignore[arg-type]

    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hostfile": Path("h")}, "--hostfile needs --deployment-type multi_node"),
        ({"node_rank": 0}, "--node-rank needs --deployment-type multi_node"),
        ({"include": "localhost:0"}, "--include needs --deployment-type single_node or multi"),
        ({"bind_cores": True}, "--bind-cores needs --deployment-type single_node or multi_node"),
        (
            {"deployment_type": MANY, "num_processes": 2},
            "--num-processes needs --deployment-type single_node; --num-gpus counts",
        ),
        (
            {"deployment_type": MANY, "include": "a", "exclude": "b"},
            "--include and --exclude can't be combined; what --include does not name is left out",
        ),
        (
            {"deployment_type": MANY, "include": "a", "num_gpus": 2},
            "--include names the slots; omit --num-gpus",
        ),
        (
            {"deployment_type": MANY, "exclude": "a", "num_nodes": 2},
            "--exclude names the hosts; omit --num-nodes",
        ),
        ({"deployment_type": MANY, "num_nodes": 0}, "--num-nodes must be above 0, got 0"),
        ({"deployment_type": MANY, "master_port": 70000}, "--master-port must be from 1 to 65535"),
        ({"deployment_type": MANY, "num_gpus": 0}, "--num-gpus must be above 0, got 0"),
        (
            {"deployment_type": "single_node", "num_gpus": 1, "num_processes": 1},
            "--num-gpus and --num-processes say the same; give one",
        ),
    ],
)
def test_options_that_contradict_each_other_are_named(
    options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Deployment(**options)  # type: ignore[arg-type]

    assert str(error.value).startswith(sentence)


def test_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="--num-gpus 3 is more than the 2 GPUs of this machine"):
        layout(Deployment(deployment_type="single_node", num_gpus=3), {})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b2", ["a", "b2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("r[1-2]-gpu", ["r1-gpu", "r2-gpu"]),
    ],
)
def test_slurms_lists_of_names_are_written_out(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n]"])
def test_a_list_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no machine; run this inside sbatch or salloc"):
        expand_nodelist(text)
