"""The launcher's command line, and what other launchers' habits come to in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.launch.cluster import parse
from pipeline.system.errors import ConfigError

ROOT = Path(__file__).parents[3]
STEP = ["-m", "step1_sft.train", "--seed", "7"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--hostfile h --config c.yaml -m step1_sft.train", "there is no option --config"),
        ("--hostfile h", "-m needs a module"),
        ("--hostfile h -m --seed 7", "-m needs a module"),
        ("--include a --num_gpus 2 -m step1_sft.train", "omit --num-gpus"),
    ],
)
def test_an_option_on_the_wrong_side_of_the_module_is_refused(argv: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(argv.split())

    assert named in str(error.value)


@pytest.fixture
def srun(tmp_path: Path) -> Path:
    """A replacement of SLURM's srun: the command once per machine, one after the other."""
    program = tmp_path / "srun"
    program.write_text(
        "#!/bin/sh\n"
        "nodes=$2\n"
        'while [ "$1" != bash ]; do shift; done\n'
        'for id in $(seq 0 $((nodes - 1))); do SLURM_NODEID=$id SLURMD_NODENAME=n$id "$@"; done\n'
    )
    program.chmod(0o755)
    return program


def test_inside_of_an_allocation_each_machine_gets_its_number(tmp_path: Path, srun: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    program = (
        "import sys; sys.executable = sys.argv.pop(1);"
        "from pipeline.launch.cluster import main; main(sys.argv[1:])"
    )

    said = subprocess.run(
        [sys.executable, "-c", program, str(python), "--no-check", *STEP],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{srun.parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[0-1]",
            "SLURM_GPUS_ON_NODE": "2",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert said.stdout.splitlines() == [
        f"-m pipeline.launch.torchrun --nnodes 2 --node-rank {rank} --master-addr n0"
        " --master-port 29507 --nproc-per-node 2 -m step1_sft.train --seed 7"
        for rank in (0, 1)
    ]
