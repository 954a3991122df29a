"""`train.py --autotune` on steps that say how fast they are, in real processes."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from pipeline.autotune.points import read_points
from pipeline.autotune.tuning import Tuning
from pipeline.budget.machine import GIB, Machine
from pipeline.budget.step import step_memory
from pipeline.demo.model import build_model, build_tokenizer
from pipeline.errors import ConfigError
from pipeline.orchestrator import main
from pipeline.plan.make import make_plan
from train import STAGES

TOY = tuple(replace(stage, module="tests.pipeline.autotune.toy_trial") for stage in STAGES)

FAST = {"1 kept": 10.0, "2 kept": 30.0, "4 kept": 20.0, "8 kept": 15.0, "16 kept": 15.0}
TABLE = {**FAST, **{size.replace("kept", "recomputed"): 5.0 for size in FAST}}
"""Tokens per second; micro-batches of two are best."""

SPACE = ("--autotune-space", "micro_batch_size=1,2,4,8")
KEPT = (*SPACE, "gradient_checkpointing=false")


class Bench:
    """A table of speeds, and an output directory beside it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = directory / "out"
        self.table = directory / "table.json"
        self.measures(TABLE)
        monkeypatch.setenv("TOY_TABLE", str(self.table))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def measures(self, table: Mapping[str, object]) -> None:
        self.table.write_text(json.dumps(table))

    def train(self, *words: str) -> None:
        start = ("--sft.micro_batch_size", "4") if "--config" not in words else ()
        main(["--output-dir", str(self.out), *words, *start], TOY)

    def tune(self, *words: str, space: Sequence[str] = KEPT) -> None:
        self.train("--step", "1", "--autotune", "tune", *space, *words)

    @property
    def started(self) -> list[str]:
        """Step, micro-batch and model of each start of a step."""
        file = self.table.with_name("started")
        return file.read_text().splitlines() if file.exists() else []

    @property
    def outcomes(self) -> list[str]:
        lines = (self.out / "autotune" / "trials.jsonl").read_text().splitlines()
        return [json.loads(line)["outcome"] for line in lines]


def save_embedded(directory: Path) -> None:
    tokenizer = build_tokenizer()
    build_model(vocab_size=len(tokenizer), seed=0).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.mark.jobs
def test_tune_finds_the_best_writes_it_and_stops(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.tune("--autotune-strategy", "grid", space=SPACE)

    best = yaml.safe_load((bench.out / "autotune" / "best.yaml").read_text())
    said = capsys.readouterr().out
    assert best["sft"]["micro_batch_size"] == 2
    assert best["sft"]["model"]["gradient_checkpointing"] is False
    assert bench.outcomes == ["measured"] * 8
    assert "8 candidates, at most 8 trials" in said
    assert "  30 tokens/s, 0.50 GB" in said
    assert "fastest with gradient_checkpointing false  micro_batch_size 2, 1.50 times" in said
    assert [each.name for each in bench.out.iterdir()] == ["autotune"]
    left = {each.name for each in (bench.out / "autotune").iterdir()}
    assert left == {"trials.jsonl", "best.yaml", "logs"}


@pytest.mark.jobs
def test_the_best_settings_run_by_themselves(bench: Bench) -> None:
    bench.tune("--autotune-strategy", "grid", "--seed", "7", "--max-length", "32", "--plan", "off")

    bench.train("--config", str(bench.out / "autotune" / "best.yaml"))

    config = yaml.safe_load((bench.out / "step1_sft" / "config.yaml").read_text())
    assert config["micro_batch_size"] == 2
    assert (config["seed"], config["data"]["max_length"]) == (7, 32)
    assert yaml.safe_load((bench.out / "autotune" / "best.yaml").read_text())["plan"] == "off"
    assert (bench.out / "step1_sft" / "result.json").is_file()


@pytest.mark.jobs
def test_run_goes_on_with_the_best(bench: Bench) -> None:
    bench.train("--step", "1", "--autotune", "run", "--autotune-strategy", "grid", *KEPT)

    config = yaml.safe_load((bench.out / "step1_sft" / "config.yaml").read_text())
    assert config["micro_batch_size"] == 2
    assert config["max_steps"] == 500  # not that of a trial
    assert (bench.out / "summary.json").is_file()


@pytest.mark.jobs
def test_a_trial_that_fails_in_any_way_is_a_point(bench: Bench) -> None:
    failing = {"1 kept": "killed", "8 kept": "out of memory"}
    bench.measures({**TABLE, **failing})

    bench.tune("--autotune-strategy", "grid", space=("--autotune-space", "micro_batch_size=1,4,8"))

    # The settings as they are, then the ladder; 8 recomputed is a rung above what ran out.
    assert bench.outcomes == ["measured", "killed", "out of memory", *["measured"] * 3]
    best = yaml.safe_load((bench.out / "autotune" / "best.yaml").read_text())
    assert best["sft"]["micro_batch_size"] == 4


@pytest.mark.jobs
def test_a_tuning_that_was_interrupted_goes_on(bench: Bench) -> None:
    bench.measures({**TABLE, "2 kept": "interrupted"})
    with pytest.raises(KeyboardInterrupt, match="keeps 2 trials, and the same command goes on"):
        bench.tune("--autotune-strategy", "grid")
    bench.measures(TABLE)

    bench.tune("--autotune-strategy", "grid")

    sizes = [line.split()[1] for line in bench.started]
    assert sizes == ["4", "1", "2", "2", "8"]
    assert len(bench.outcomes) == 4


@pytest.mark.jobs
def test_trials_of_other_settings_are_made_anew(bench: Bench) -> None:
    bench.tune("--autotune-trials", "2")
    bench.tune("--autotune-trials", "2", "--sft.batch_size", "32")
    assert len(bench.started) == 4

    bench.tune("--autotune-trials", "2", "--sft.max_steps", "9")  # changes no trial
    assert len(bench.started) == 4

    mine = bench.out / "autotune" / "logs" / "notes.txt"
    mine.write_text("mine")
    bench.tune("--autotune-trials", "2", "--overwrite")
    assert len(bench.started) == 6
    assert len(bench.outcomes) == 2
    assert mine.read_text() == "mine"


def test_wrong_input_ends_the_tuning_at_once(bench: Bench) -> None:
    bench.measures({**TABLE, "4 kept": "refused"})

    with pytest.raises(ConfigError, match=r"^rows.jsonl line 3 has no prompt$"):
        bench.tune()

    assert len(bench.started) == 1
    assert not (bench.out / "autotune" / "trials.jsonl").exists()  # nothing stands in the way


def test_where_there_is_one_candidate_nothing_is_tried(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ("micro_batch_size=4", "gradient_checkpointing=true")
    bench.tune(space=("--autotune-space", *one))
    bench.tune("--sft.model.gradient_checkpointing", "true", space=())

    assert bench.started == []
    assert capsys.readouterr().out.count("step 1: step1_sft has nothing to tune") == 2
    best = yaml.safe_load((bench.out / "autotune" / "best.yaml").read_text())
    assert best["sft"]["model"]["gradient_checkpointing"] is True


@pytest.mark.jobs
def test_steps_that_are_finished_keep_what_was_found_for_them(bench: Bench) -> None:
    words = ("--autotune-strategy", "grid", "--reward.micro_batch_size", "4", *KEPT)
    bench.train("--step", "1", "--autotune", "run", *words)
    save_embedded(bench.out / "step1_sft")  # the toy leaves no model, and step 2 looks for one

    bench.train("--step", "1", "2", "--resume", "--autotune", "tune", *words)

    best = yaml.safe_load((bench.out / "autotune" / "best.yaml").read_text())
    assert best["sft"]["micro_batch_size"] == 2
    assert best["reward"]["micro_batch_size"] == 2


def test_where_nothing_can_be_measured_it_says_so(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.measures(dict.fromkeys(TABLE, "killed"))

    with pytest.raises(SystemExit) as end:
        bench.tune("--autotune-trials", "2")

    assert end.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith("no settings of step 1 could be measured; the last of 2 trials ended")
    assert not (bench.out / "autotune" / "best.yaml").exists()


@pytest.mark.jobs
def test_steps_that_start_from_others_get_models_to_be_tried_with(bench: Bench) -> None:
    model = ("--reward.micro_batch_size", "4")
    bench.train("--step", "1", "2", "--autotune", "tune", *SPACE, "--autotune-trials", "1", *model)

    models = bench.out / "autotune" / ".models"
    assert bench.started == [
        "step1_sft 4 embedded",
        "step1_sft 4 embedded",
        f"step2_reward 4 {models}/step1_sft",
    ]
    assert not models.exists()
    best = yaml.safe_load((bench.out / "autotune" / "best.yaml").read_text())
    assert best["reward"]["micro_batch_size"] == 4
    assert "path" not in best["reward"].get("model", {})


def test_what_the_plan_refuses_is_not_tried(bench: Bench) -> None:
    words = ["--output-dir", str(bench.out), "--step", "1", "--sft.micro_batch_size", "1"]
    words += ["--sft.model.gradient_checkpointing", "false"]
    plan = make_plan([*words, "--autotune", "tune", "--autotune-strategy", "grid", *SPACE], TOY)
    (stage,) = plan.stages
    roomy = Machine(1, 1, None, 64 * GIB)
    config = replace(plan.configs["step1_sft"], micro_batch_size=2)
    two = step_memory(config, machine=roomy).peak("device")

    with pytest.raises(ConfigError, match=r"step 1 takes .* of its candidates none takes less"):
        Tuning(replace(plan, machine=replace(roomy, host_bytes=1)), stage).best()
    tuning = Tuning(replace(plan, machine=replace(roomy, host_bytes=two)), stage)

    assert tuning.space.named(tuning.best()) == {"micro_batch_size": 2}
    assert [line.split()[1] for line in bench.started] == ["1", "2"]


def test_the_space_names_settings_that_there_are(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="did you mean micro_batch_size"):
        bench.train("--autotune", "tune", "--autotune-space", "micro_batchsize=1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--autotune-trials 3", "--autotune-trials needs --autotune tune or --autotune run"),
        ("--autotune tune --autotune-trials 0", "--autotune-trials must be above 0, got 0"),
        ("--autotune tune --dry-run", "--autotune makes trials, on machines that this command"),
        ("--autotune tune --plan-for 4x24GB", "--autotune makes trials, on machines that this"),
        ("--autotune-steps 8", "--autotune-steps needs --autotune tune or --autotune run"),
        ("--autotune-minutes 5", "--autotune-minutes needs --autotune tune or --autotune run"),
        ("--autotune often", "--autotune must be one of 'tune', 'run' or null, got often"),
    ],
)
def test_options_that_do_not_go_together_are_a_sentence(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(words.split(), TOY)

    assert str(error.value).startswith(sentence)


def test_points_of_a_tuning_are_read_with_their_key(bench: Bench) -> None:
    bench.tune("--autotune-trials", "1")

    file = bench.out / "autotune" / "trials.jsonl"
    (record,) = (json.loads(line) for line in file.read_text().splitlines())
    (point,) = read_points(file, step="step1_sft", key=record["key"])
    assert point.tokens_per_second == (20.0,) * 4
    assert point.seconds > 0


@pytest.mark.jobs
def test_no_process_is_left_when_the_scheduler_stops_a_trial(bench: Bench) -> None:
    bench.measures(dict.fromkeys(TABLE, "hang"))
    program = (
        "from pipeline.cli import run_main; from pipeline.orchestrator import main\n"
        "from tests.pipeline.autotune.test_tune import TOY\n"
        "run_main(lambda argv: main(argv, TOY))\n"
    )
    words = ["--output-dir", str(bench.out), "--step", "1", "--autotune", "tune"]
    process = psutil.Popen(
        [sys.executable, "-c", program, *words, "--sft.micro_batch_size", "4"],
        stderr=subprocess.PIPE,
        text=True,
    )
    child = bench.table.with_name("child")
    while not child.exists() or not child.read_text():
        assert process.poll() is None
        time.sleep(0.02)

    process.terminate()
    _, said = process.communicate(timeout=60)

    assert process.returncode == 75
    assert "stopped while step 1 was tuned" in said
    assert not psutil.pid_exists(int(child.read_text()))
