"""The Kubernetes manifest and its pods."""

from pathlib import Path

import pytest
import yaml

from pipeline.launch.child import ExitStatus
from pipeline.run import orchestrator
from pipeline.system.errors import ConfigError
from tests.pipeline.stages import TOY_STAGES

KUBERNETES = ["--deployment-type", "kubernetes", "--image", "site/rlhf:1", "--volume", "data"]
OPTIONS = ["--num-nodes", "2", "--num-gpus", "8", "--step", "1", "2", "--plan", "off"]
OPTIONS += ["--fields", "prompt=$(A)"]


def test_job_set_restarts_indexed_pods_that_run_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[str] = []

    def run_child(command: list[str], _environment: object) -> ExitStatus:
        commands.append(" ".join(command))
        return ExitStatus(0)

    monkeypatch.setattr(orchestrator, "run_child", run_child)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "cluster.yaml"
    settings.write_text("{deployment_type: kubernetes, image: 'site/rlhf:1', volume: data}")
    argv = ["--config", "cluster.yaml", *OPTIONS, "--output-dir", "My run_1"]

    orchestrator.main([*argv, "--dry-run"], TOY_STAGES)

    job_set = yaml.safe_load(capsys.readouterr().out)
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] > 0 == job["backoffLimit"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    (rule,) = job_set["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert job["parallelism"] == job["completions"] == 2
    assert (job["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert [mount["name"] for mount in container["volumeMounts"]] == ["volume", "shm"]
    assert "prompt=$$(A)" in container["command"]  # Kubernetes would expand $(A)

    program, *arguments = container["command"]
    orchestrator.main(arguments, TOY_STAGES)

    assert program == "rlhf"
    for number, command in enumerate(commands):
        address = f"rlhf-my-run-1-nodes-0-0.rlhf-my-run-1 --master-port {29500 + number}"
        assert f"--nnodes 2 --node-rank 1 --master-addr {address} --nproc-per-node 8" in command
    assert (len(commands), list(tmp_path.iterdir())) == (2, [settings])


def test_manifest_is_written_unless_options_are_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for options, message in (
        (KUBERNETES, "kubernetes needs --num-nodes"),
        ([*KUBERNETES, *OPTIONS, "--output-dir", "/out"], "--output-dir relative to its volume"),
    ):
        with pytest.raises(ConfigError, match=message):
            orchestrator.main(options, TOY_STAGES)

    orchestrator.main([*KUBERNETES, *OPTIONS], TOY_STAGES)

    assert yaml.safe_load(Path("output/jobset.yaml").read_text())["kind"] == "JobSet"
