"""No step evaluates prompts that any step of its run trained on.

The loaded rows and recorded hashes are compared with the files' texts, which are hashed
here by independent code.
"""

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DataConfig, FrozenModelConfig, StepConfig, TrainedModelConfig
from pipeline.data.sharing.steps import load_step_rows, record_prompts
from pipeline.system.errors import DataError
from step1_sft.config import SFTConfig
from step1_sft.train import train as train_sft
from step2_reward.config import RewardConfig
from step2_reward.train import train as train_reward
from step3_ppo.config import PPOConfig
from step3_ppo.train import train as train_ppo
from tests.step3_ppo.toy import save_models

NAMES = {1: "step1_sft", 2: "step2_reward", 3: "step3_ppo"}


def append_rows(path: Path, name: str, count: int) -> str:
    with path.open("a") as file:
        for n in range(count):
            row = {"prompt": f"{name} {n}", "chosen": "good", "rejected": "bad"}
            file.write(json.dumps(row) + "\n")
    return str(path)


def hash_text(text: str) -> int:
    """Hash a prompt as docs/data.md specifies."""
    digest = hashlib.sha256(" ".join(text.split()).casefold().encode()).digest()
    return struct.unpack("<Q", digest[:8])[0]


def read_hashes(directory: Path, name: str) -> set[int]:
    content = (directory / f"{name}_prompts.hashes").read_bytes()
    assert content[:8] == b"PROMPTS1"
    return {number for (number,) in struct.iter_unpack("<Q", content[8:])}


def make_config(step: int, tmp_path: Path, data: DataConfig, **changes: Any) -> StepConfig:
    out = tmp_path / "out"
    settings: dict[str, Any] = {
        1: {},
        2: {},
        3: {
            "actor": TrainedModelConfig(path=str(out / "step1_sft")),
            "reward": FrozenModelConfig(path=str(out / "step2_reward")),
        },
    }[step]
    config_class = {1: SFTConfig, 2: RewardConfig, 3: PPOConfig}[step]
    return config_class(output_dir=out / NAMES[step], data=data, **{**settings, **changes})


def load_steps(
    tmp_path: Path, make_data: Callable[[int], DataConfig], seeds: dict[int, int]
) -> tuple[dict[int, set[str]], dict[int, set[str]], list[str]]:
    """Load all steps; return the prompts that each trains on and evaluates, and the notes."""
    trained, evaluated, notes = {}, {}, []
    for step in (1, 2, 3):
        config = make_config(step, tmp_path, make_data(step), seed=seeds.get(step, 1234))
        config.output_dir.mkdir(parents=True, exist_ok=True)
        rows = load_step_rows(config, step=step)
        record_prompts(rows.prompts, config)
        trained[step] = {example.prompt[0].content for example in rows.train}
        evaluated[step] = {example.prompt[0].content for example in rows.eval}
        notes += rows.notes
    return trained, evaluated, notes


CHANGES = (
    *("nothing", "seed", "extra file", "swapped paths", "larger fraction", "smaller fraction"),
    *("grown file", "data seed", "eval path", "split"),
)


@pytest.mark.parametrize("change", CHANGES)
def test_no_step_evaluates_prompts_that_any_step_trains_on(change: str, tmp_path: Path) -> None:
    first, second = (append_rows(tmp_path / f"{name}.jsonl", name, 120) for name in ("a", "b"))
    extra = append_rows(tmp_path / "extra.jsonl", "a", 60)  # repeats prompts of the first file
    append_rows(Path(extra), "extra", 60)
    eval_path = append_rows(tmp_path / "own.jsonl", "a", 120)
    append_rows(Path(eval_path), "own", 20)

    def data(step: int) -> DataConfig:
        default = DataConfig(path=(first, second), max_eval_rows=999)
        step3_changes: dict[str, dict[str, Any]] = {
            "swapped paths": {"path": (second, first)},
            "larger fraction": {"eval_fraction": 0.4},
            "smaller fraction": {"eval_fraction": 0.02},
            "data seed": {"seed": 1},
            "eval path": {"eval_path": (eval_path,)},
            "split": {"split": (0.0, 0.0, 1.0)},
        }
        if change == "extra file" and step == 1:
            return replace(default, path=(first, second, extra))
        if change == "grown file" and step == 3:
            append_rows(Path(first), "new", 100)
        return replace(default, **step3_changes.get(change, {})) if step == 3 else default

    seeds = {3: 1} if change == "seed" else {}
    trained, evaluated, notes = load_steps(tmp_path, data, seeds)

    all_trained = set.union(*trained.values())
    assert min(map(len, [*trained.values(), *evaluated.values()])) > 0
    assert not all_trained & set.union(*evaluated.values())
    directory = tmp_path / "out" / NAMES[3]
    assert read_hashes(directory, "trained") == set(map(hash_text, all_trained))
    assert read_hashes(directory, "held_out") == set(map(hash_text, set.union(*evaluated.values())))
    dropped = any("an earlier step" in note for note in notes)
    assert dropped == (change in CHANGES[4:6] + CHANGES[7:])


def test_evaluation_rows_that_were_all_trained_on_are_rejected(tmp_path: Path) -> None:
    rows = append_rows(tmp_path / "rows.jsonl", "a", 60)
    data = DataConfig(path=(rows,), split=(1.0, 0.0, 1.0))
    first = make_config(1, tmp_path, data)
    first.output_dir.mkdir(parents=True)
    loaded = load_step_rows(first, step=1)
    record_prompts(loaded.prompts, first)
    eval_file = tmp_path / "own.jsonl"
    eval_file.write_text(
        "".join(json.dumps({"prompt": e.prompt[0].content}) + "\n" for e in loaded.train)
    )

    with pytest.raises(DataError) as raised:
        load_step_rows(make_config(3, tmp_path, replace(data, eval_path=(str(eval_file),))), step=3)
    assert str(raised.value).startswith(
        f"dropped {len(loaded.train)} rows for evaluation whose prompt an earlier step trained on,"
        " so nothing remains; pass --eval-path with other prompts"
    )


def test_prompt_hashes_are_found_above_an_exported_actor(tmp_path: Path) -> None:
    rows = append_rows(tmp_path / "rows.jsonl", "a", 60)
    elsewhere = replace(
        make_config(1, tmp_path, DataConfig(path=(rows,))), output_dir=tmp_path / "elsewhere"
    )
    elsewhere.output_dir.mkdir()
    loaded = load_step_rows(elsewhere, step=1)
    record_prompts(loaded.prompts, elsewhere)
    actor = TrainedModelConfig(path=str(tmp_path / "elsewhere" / "actor"))
    data = DataConfig(path=(rows,), split=(0.0, 0.0, 1.0))

    step3 = load_step_rows(make_config(3, tmp_path, data, actor=actor), step=3)

    repeated = f"trained on {len(loaded.train)} of the {len(step3.train)} prompts"
    assert any(repeated in note for note in step3.notes)


@pytest.mark.jobs
def test_three_trained_steps_share_no_prompts_with_their_evaluations(tmp_path: Path) -> None:
    save_models(tmp_path)
    first, second = (append_rows(tmp_path / f"{name}.jsonl", name, 60) for name in ("a", "b"))
    extra = append_rows(tmp_path / "extra.jsonl", "extra", 20)
    common: dict[str, Any] = {"max_steps": 1, "batch_size": 8, "micro_batch_size": 8}
    small = DataConfig(path=(first, second), max_length=64)
    model = TrainedModelConfig(path=str(tmp_path / "actor"))

    def run(step: int, data: DataConfig, **settings: Any) -> Path:
        steps: dict[int, Callable[[Any], Path]] = {1: train_sft, 2: train_reward, 3: train_ppo}
        return steps[step](make_config(step, tmp_path, data, **common, **settings))

    run(1, replace(small, path=(first, second, extra)), model=model)
    run(2, small, model=model)
    append_rows(Path(first), "new", 40)
    out = run(
        3,
        replace(small, path=(second, first), eval_fraction=0.4),
        critic=TrainedModelConfig(path=str(tmp_path / "out" / NAMES[2])),
        rollout_size=8,
        max_prompt_length=40,
        max_new_tokens=4,
        seed=1,
    )

    directories = [tmp_path / "out" / name for name in NAMES.values()]
    trained, held_out = (
        set[int]().union(*(read_hashes(directory, name) for directory in directories))
        for name in ("trained", "held_out")
    )
    assert trained
    assert not trained & held_out
    samples = json.loads((out / "samples.json").read_text())["rows"]
    answered = [row["prompt"][0]["content"] for row in samples]
    assert answered
    assert not set(map(hash_text, answered)) & read_hashes(out, "trained")
    assert set(map(hash_text, answered)) <= read_hashes(out, "held_out")
