"""The directory, files and log of a training run."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from pipeline.config import LoraConfig, TrainedModelConfig
from pipeline.parallel.mesh import current_mesh
from pipeline.run.run import Run, changed_settings
from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig
from tests.inference.test_responses import read_rows

MESH = current_mesh()


def make_config(directory: Path, *, log_every: int = 1) -> SFTConfig:
    return SFTConfig(output_dir=directory, log_every=log_every)


def test_run_writes_settings_metrics_and_a_result(tmp_path: Path) -> None:
    with Run(make_config(tmp_path), name="step1_sft", total_steps=2, mesh=MESH) as run:
        run.log_eval(0, {"perplexity": 9.0})
        run.log(1, tokens=100, loss=2.0, lr=1e-3)
        run.log(2, tokens=50, loss=1.5, lr=0.0)
        run.finish(eval={"perplexity_after": 4.5}, best_step=2)

    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["batch_size"] == 32
    before, first, _ = read_rows(tmp_path / "metrics.jsonl")
    assert before["eval_perplexity"] == 9.0
    assert (first["step"], first["loss"], first["lr"]) == (1, 2.0, 1e-3)
    assert first["tokens_per_second"] > 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["steps"], result["tokens"], result["best_step"]) == (2, 150, 2)
    assert result["eval"] == {"perplexity_after": 4.5}
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.yaml", "metrics.jsonl", "result.json"}


def test_changed_settings_omit_defaults_of_list_items_and_sections() -> None:
    source = RewardConfig(name="right", kind="math", weight=2.0)
    actor = TrainedModelConfig(lora=LoraConfig(lr=1e-4))

    assert changed_settings(PPOConfig(rewards=(source,), actor=actor)) == {
        "rewards": [{"name": "right", "kind": "math", "weight": 2.0}],
        "actor.lora.rank": 16,
        "actor.lora.lr": 1e-4,
    }


def test_nan_and_infinity_are_written_as_null(tmp_path: Path) -> None:
    with Run(make_config(tmp_path), name="run", total_steps=1, mesh=MESH) as run:
        run.log(1, loss=float("nan"), ratio_max=float("inf"))
        run.finish(eval={"judge": {"base": float("nan")}})

    (line,) = read_rows(tmp_path / "metrics.jsonl")
    assert line["loss"] is line["ratio_max"] is None
    assert json.loads((tmp_path / "result.json").read_text())["eval"] == {"judge": {"base": None}}


def test_unfinished_run_is_not_restarted_without_resume(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)

    with (
        pytest.raises(ConfigError, match="unfinished run; pass --resume to continue it"),
        Run(make_config(tmp_path), name="step1_sft", total_steps=2, mesh=MESH),
    ):
        pass

    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    (tmp_path / "result.json").write_text("{}")  # a finished run may be repeated
    with (
        pytest.raises(ConfigError, match=r"result.json/.lock can't be created: File exists"),
        Run(make_config(tmp_path / "result.json"), name="step1_sft", total_steps=2, mesh=MESH),
    ):
        pass
    with Run(make_config(tmp_path), name="step1_sft", total_steps=2, mesh=MESH):
        pass


ENDLESS = """
    import sys
    from pathlib import Path
    from step1_sft.config import SFTConfig
    from pipeline.parallel.mesh import current_mesh
    from pipeline.system.logs import configure_logging
    from pipeline.run.run import Run

    configure_logging(is_main=True)
    config = SFTConfig(output_dir=Path(sys.argv[1]))
    with Run(config, name="step1_sft", total_steps=10**9, mesh=current_mesh()) as run:
        for step in range(1, 10**9):
            run.log(step, tokens=1, loss=0.1 * step)
"""


@pytest.mark.jobs
def test_killed_run_leaves_only_complete_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ENDLESS), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        metrics = tmp_path / "metrics.jsonl"
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size > 10_000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()

    steps = [line["step"] for line in read_rows(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert metrics.read_bytes().endswith(b"\n")
    assert not (tmp_path / "result.json").exists()
