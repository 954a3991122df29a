"""The launcher's command line."""

import subprocess
import sys

import pytest

from pipeline.launch.cluster import parse_arguments
from pipeline.launch.commands import srun_command
from pipeline.launch.layout import Deployment, resolve_layout
from pipeline.system.errors import ConfigError

STEP = ["-m", "step1_sft.train", "--seed", "7"]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_GPUS_ON_NODE": "2"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--hostfile h --image i -m step1_sft.train", "there is no option --image"),
        ("--hostfile h -m --seed 7", "-m needs a module"),
        ("--include a --num_gpus 2 -m step1_sft.train", "omit --num-gpus"),
    ],
)
def test_invalid_launcher_options_raise(argv: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments(argv.split())


def test_machines_of_a_slurm_allocation_get_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    layout = resolve_layout(Deployment(deployment_type="multi_node"), SLURM)
    *_, shell, flag, line = srun_command(STEP, layout)

    for rank in ("0", "1"):  # as srun does
        result = subprocess.run(
            [shell, flag, line], env={"SLURM_NODEID": rank}, stdout=subprocess.PIPE, check=True
        )

        assert result.stdout.decode() == (
            f"-m pipeline.launch.torchrun --nnodes 2 --node-rank {rank} --master-addr n0"
            " --master-port 29507 --nproc-per-node 2 -m step1_sft.train --seed 7\n"
        )
