"""The plan counts before it starts, refuses what can't fit, and chooses where it is told to."""

import socket
from pathlib import Path

import pytest
import yaml

from pipeline.budget.fit import shortage
from pipeline.config import TrainedModelConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.launch.local import PLANNED
from pipeline.orchestrator import main
from pipeline.plan.describe import describe_plan
from pipeline.plan.make import make_plan
from pipeline.plan.memory import (
    insist_on_memory,
    memory_of,
    refusals,
)
from pipeline.plan.plan import Plan
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig
from tests.pipeline.stages import TOY_STAGES


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(tmp_path: Path, words: str) -> Plan:
    return make_plan(["--output-dir", str(tmp_path / "out"), *words.split()], TOY_STAGES)


def test_a_plan_for_other_machines_has_their_processes(tmp_path: Path) -> None:
    one, eight, two = (
        plan(tmp_path, f"--step 1 --plan-for {text}")
        for text in ("1xA100-80GB", "8xA100-80GB", "2x8xA100-80GB")
    )

    assert [each.processes for each in (one, eight, two)] == [None, 8, 16]
    assert len(two.where.hosts) == 2
    assert "--nnodes 2" in describe_plan(two)


def test_what_cant_fit_is_refused_with_the_cheapest_change_that_does(tmp_path: Path) -> None:
    words = "--step 1 --actor-model facebook/opt-1.3b --plan-for 1xT4-16GB"

    with pytest.raises(ConfigError) as error:
        insist_on_memory(plan(tmp_path, words))

    sentence = str(error.value)
    assert sentence.startswith("step 1 takes ")
    assert " GiB on each GPU to train, and there are 15.0 GiB; it fits with --sft." in sentence
    change = sentence.partition("it fits with ")[2]
    insist_on_memory(plan(tmp_path, f"{words} {change}"))


@pytest.mark.jobs
def test_a_start_that_cant_fit_ends_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output-dir", str(tmp_path / "out"), "--actor-model", "facebook/opt-66b"]
    words += ["--step", "1", "--sft.model.precision", "fp32", "--sft.micro_batch_size", "1"]
    words += ["--sft.model.gradient_checkpointing", "true"]

    with pytest.raises(ConfigError, match=r"^step 1 takes [\d.]+ GiB on each machine to"):
        main(words, TOY_STAGES)
    assert not (tmp_path / "out").exists()

    main([*words, "--plan", "off", "--dry-run"], TOY_STAGES)
    assert "refused" not in capsys.readouterr().out


def test_a_dry_run_shows_each_phase(tmp_path: Path) -> None:
    said = describe_plan(plan(tmp_path, "--dry-run --plan-for 2xA100-80GB"))

    headers = [line.split() for line in said.splitlines() if line.startswith("  MiB")]
    assert headers == [
        ["MiB", "load", "score", "train"],
        ["MiB", "load", "score", "train", "generate"],
        ["MiB", "load", "generate", "score", "train", "compare"],
    ]
    for kind in ("weights", "moments", "activations", "kv cache", "runtime", "in all"):
        assert f"\n  {kind} " in said
    assert "2xA100-80GB has 80.0 GiB on each GPU" in said
    assert "refused" not in said


@pytest.mark.jobs
def test_auto_takes_the_fastest_rung_with_room(tmp_path: Path) -> None:
    def chosen(machine: str) -> tuple[TrainedModelConfig, int]:
        words = f"--step 1 --actor-model facebook/opt-1.3b --plan auto --plan-for {machine}"
        config = plan(tmp_path, words).configs["step1_sft"]
        assert isinstance(config, SFTConfig)
        return config.model, config.micro_batch_size

    large, rows = chosen("1xH200-141GB")
    small, fewer = chosen("1xT4-16GB+64GB")
    many, _ = chosen("8xT4-16GB+512GB")

    assert (large.gradient_checkpointing, large.zero.offload.optimizer, rows) == (False, "none", 32)
    assert small.zero.offload.optimizer == "cpu"
    assert fewer >= 1
    assert (many.zero_stage, many.zero.offload.optimizer) == (2, "none")


@pytest.mark.jobs
@pytest.mark.parametrize("words", ["", "--step 1 --actor-model facebook/opt-1.3b"])
def test_what_auto_chose_fits_and_is_written_as_a_file(tmp_path: Path, words: str) -> None:
    automatic = plan(tmp_path, f"{words} --plan auto --plan-for 1xRTX3090-24GB+256GB")

    said = describe_plan(automatic)

    for stage in automatic.stages:
        assert shortage(memory_of(automatic, stage), automatic.machine) is None
    text = said.partition("as a file for --config:\n")[2].partition("\n\n")[0]
    file = tmp_path / "chosen.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(text)))
    again = plan(tmp_path, f"{words} --config {file} --plan-for 1xRTX3090-24GB+256GB")
    assert again.configs == automatic.configs


def test_the_users_own_settings_win(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("sft: {model: {gradient_checkpointing: true}}\n")

    mine = plan(
        tmp_path,
        "--step 1 --actor-model facebook/opt-1.3b --plan auto --plan-for 2xH200-141GB"
        f" --sft.micro_batch_size 3 --actor-zero-stage 3 --config {file}",
    )

    config = mine.configs["step1_sft"]
    assert isinstance(config, SFTConfig)
    assert (config.micro_batch_size, config.model.zero_stage) == (3, 3)
    assert config.model.gradient_checkpointing
    assert "micro_batch_size" not in mine.chosen["sft"]
    assert "model.zero_stage" not in mine.chosen["sft"]


@pytest.mark.jobs
def test_auto_gives_the_keys_and_values_the_room_there_is(tmp_path: Path) -> None:
    def answers(machine: str) -> int:
        words = "--step 3 --ppo.actor.path facebook/opt-350m --ppo.critic.path facebook/opt-125m"
        words += " --ppo.reward.path facebook/opt-125m --ppo.rollout_size 4096 --plan auto"
        words += " --actor-model facebook/opt-350m --ppo.micro_batch_size 4"
        config = plan(tmp_path, f"{words} --plan-for {machine}").configs["step3_ppo"]
        assert isinstance(config, PPOConfig)
        return config.generation_batch_size

    assert 1 <= answers("1xA100-40GB+512GB") < answers("1xH200-141GB+512GB") < 4096


@pytest.mark.jobs
def test_auto_divides_a_model_rather_than_offload_it(tmp_path: Path) -> None:
    large = "--step 1 --actor-model meta-llama/Llama-3.1-70B --plan auto --plan-for"
    small = "--step 1 --actor-model facebook/opt-125m --plan auto --plan-for"

    cut = plan(tmp_path, f"{large} 2x8xH100-80GB")
    own = plan(tmp_path, f"{small} 4xT4-16GB --pipeline-parallel 4")

    config = cut.configs["step1_sft"]
    assert isinstance(config, SFTConfig)
    assert config.parallel.pp * config.parallel.tp > 1
    assert config.model.zero.offload.optimizer == "none"
    assert own.configs["step1_sft"].parallel.pp == 4
    assert "parallel.pp" not in own.chosen["sft"]
    for each in (cut, own):
        assert shortage(memory_of(each, each.stages[0]), each.machine) is None


def test_auto_needs_to_know_the_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--plan auto can't choose for step 1: model a/b is not"):
        plan(tmp_path, "--step 1 --actor-model a/b --plan auto --plan-for 1xT4-16GB")


def test_a_machine_beside_the_job_says_nothing_of_those_that_do_it(tmp_path: Path) -> None:
    def job(*hosts: str, words: str = "") -> Plan:
        file = tmp_path / "hosts"
        file.write_text("".join(f"{host} slots=2\n" for host in hosts))
        words += f" --deployment-type multi_node --hostfile {file} --step 1"
        return plan(tmp_path, f"{words} --actor-model facebook/opt-66b --sft.micro_batch_size 1")

    beside, among = job("worker-0", "worker-1"), job("worker-0", socket.gethostname())

    assert not list(refusals(beside))
    assert "each machine of the job has GPUs whose memory is not known" in describe_plan(beside)
    assert PLANNED not in beside.environment  # so that the step looks, where it runs
    assert among.machine.host_bytes is not None
    assert shortage(memory_of(among, among.stages[0]), among.machine) is not None
    assert PLANNED in among.environment
    assert PLANNED in job("worker-0", words="--plan off").environment
    with pytest.raises(ConfigError, match=r"--plan auto can't choose, for each machine of the job"):
        job("worker-0", words="--plan auto")
