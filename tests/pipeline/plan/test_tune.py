"""`train.py --autotune` with steps of given speeds, in real processes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipeline.run.orchestrator import main
from pipeline.system.errors import ConfigError
from train import STAGES

TOY = tuple(replace(stage, module="tests.pipeline.plan.toy_trial") for stage in STAGES)

SPEEDS = {"64": 20.0, "32": 30.0, "16": 15.0, "8": 15.0, "2": 10.0}
TABLE = {
    f"{size} {how}": speed / (1 if how == "kept" else 2)
    for size, speed in SPEEDS.items()
    for how in ("kept", "recomputed")
}
"""Tokens per second; micro-batches of 32 are fastest, without recomputation."""


class Bench:
    """A table of speeds, and an output directory."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = directory / "out"
        self.table = directory / "table.json"
        self.set_speeds(TABLE)
        monkeypatch.setenv("TOY_TABLE", str(self.table))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def set_speeds(self, table: Mapping[str, object]) -> None:
        self.table.write_text(json.dumps(table))

    def tune(self, *argv: str, step: str = "1") -> None:
        main(["--output-dir", str(self.out), "--step", *step.split(), *argv], TOY)

    @property
    def started(self) -> list[str]:
        """Step, micro-batch and model of each start of a step."""
        file = self.table.with_name("started")
        return file.read_text().splitlines() if file.exists() else []

    @property
    def sizes(self) -> list[str]:
        return [line.split()[1] for line in self.started]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.mark.jobs
def test_micro_batch_is_doubled_or_halved_while_it_is_faster(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.tune("--autotune", "tune")

    assert bench.sizes == ["64", "32", "16", "32"]
    assert "the fastest settings: --sft.micro_batch_size 32\n" in capsys.readouterr().out
    outcomes = (bench.out / "autotune" / "trials.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in outcomes] == ["measured"] * len(outcomes)
    assert {path.name for path in bench.out.iterdir()} == {"autotune"}
    names = {path.name for path in (bench.out / "autotune").iterdir()}
    assert names == {"trials.jsonl", "logs"}


@pytest.mark.jobs
def test_failed_trials_are_not_selected_and_the_best_runs(bench: Bench) -> None:
    bench.set_speeds({**TABLE, "64 kept": "out of memory", "32 kept": "killed"})

    bench.tune("--autotune", "run")

    config = yaml.safe_load((bench.out / "step1_sft" / "config.yaml").read_text())
    assert config["micro_batch_size"] == 16
    assert (bench.out / "summary.json").is_file()


@pytest.mark.grid
def test_later_steps_start_from_models_of_trials(bench: Bench) -> None:
    options = ("--sft.micro_batch_size", "2", "--reward.micro_batch_size", "2")
    bench.tune("--autotune", "tune", *options, step="1 2")

    models = bench.out / "autotune" / ".models"
    assert bench.started == [
        *["step1_sft 2 embedded"] * 2,
        *[f"step2_reward 2 {models}/step1_sft"] * 2,
    ]
    assert not models.exists()


def test_invalid_input_ends_tuning_immediately(bench: Bench) -> None:
    bench.set_speeds(dict.fromkeys(TABLE, "refused"))

    with pytest.raises(ConfigError, match=r"^rows.jsonl line 3 has no prompt$"):
        bench.tune("--autotune", "tune")

    assert len(bench.started) == 1
