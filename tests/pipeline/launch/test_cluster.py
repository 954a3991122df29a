"""The launcher's command line, and what other launchers' habits come to in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.launch.cluster import parse
from pipeline.launch.deployment import Deployment

ROOT = Path(__file__).parents[3]
STEP = ["-m", "step1_sft.train", "--seed", "7"]


def test_options_stand_before_the_module_and_settings_after_it() -> None:
    deployment, step = parse(["--hostfile", "h", "--num_gpus=4", *STEP])

    assert deployment == Deployment(deployment_type="multi_node", hostfile=Path("h"), num_gpus=4)
    assert step == STEP


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            "--hostfile h --config c.yaml -m step1_sft.train",
            "--config is not an option of the launcher; a setting of the step belongs after"
            " -m step1_sft.train",
        ),
        (
            "-m step1_sft.train --hostfile h",
            "--hostfile is the launcher's; put it before -m step1_sft.train",
        ),
        (
            "-m step1_sft.train --seed 1 --num_gpus 4",
            "--num-gpus is the launcher's; put it before -m step1_sft.train",
        ),
        ("--hostfile h", "-m names no module; end the command with -m MODULE and its options"),
        ("--hostfile h -m", "-m names no module"),
        ("--hostfile h -m --seed 7", "-m names no module"),
        ("train.py --hostfile h", "unexpected word 'train.py'; options start with --"),
        (
            "--local_rank 0 -m step1_sft.train",
            "--local-rank is given to each process by torchrun, in LOCAL_RANK; leave it out",
        ),
        (
            "--deepspeed -m step1_sft.train",
            "--deepspeed: the DeepSpeed file is a setting of the step; put it after"
            " -m step1_sft.train, as --zero-config FILE",
        ),
        (
            "-m step1_sft.train --deepspeed --deepspeed ds.json",
            "--deepspeed: the DeepSpeed file is the step's --zero-config FILE",
        ),
        (
            "--hostfile a --hostfile b -m step1_sft.train",
            "--hostfile is given twice; the launcher takes it once",
        ),
        ("-m step1_sft.train --config", "--config needs a file"),
        ("-m step1_sft.train --zero-config no.json", "--zero-config no.json: no such file"),
        (
            "--nproc_per_node 8 -m step1_sft.train",
            "--nproc-per-node is torchrun's; here --num-gpus",
        ),
        (
            "--hostfle h -m step1_sft.train",
            "--hostfle is not an option of the launcher; did you mean --hostfile? A setting of the",
        ),
        (
            "--include a --num_gpus 2 -m step1_sft.train",
            "--include names the slots; omit --num-gpus",
        ),
    ],
)
def test_a_word_in_the_wrong_place_is_answered_with_the_right_one(argv: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(argv.split())

    assert str(error.value).startswith(sentence)


def test_a_local_rank_that_other_launchers_add_for_a_step_is_left_to_it() -> None:
    assert parse([*STEP, "--local_rank", "0"])[1] == [*STEP, "--local_rank", "0"]


def run(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pipeline.launch.cluster", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_the_options_and_a_mistake_exits_with_2(tmp_path: Path) -> None:
    said = run("--help")
    wrong = run("--hostfile", str(tmp_path / "none"), "-m", "step1_sft.train")

    assert said.returncode == 0
    assert "--hostfile PATH" in said.stdout
    assert (wrong.returncode, wrong.stderr) == (
        2,
        f"error: --hostfile {tmp_path / 'none'}: no such file\n",
    )


@pytest.fixture
def srun(tmp_path: Path) -> Path:
    """What stands for SLURM's srun: the command once for each machine, one after the other."""
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
