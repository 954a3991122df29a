import json
import random
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.config import DataConfig
from pipeline.data.examples import Example
from pipeline.data.sharing.prompts import fingerprint
from pipeline.data.sharing.steps import StepData, load_examples


def write(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(count: int, name: str = "q") -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{n}", "chosen": "good", "rejected": "bad"} for n in range(count)]


def load(
    *paths: str, step: int = 1, seed: int = 0, data_seed: int = 0, **settings: Any
) -> StepData:
    config = DataConfig(path=paths, seed=data_seed, **settings)
    return load_examples(config, step=step, seed=seed)


def prompts(examples: list[Example]) -> list[str]:
    return [example.prompt[-1].content for example in examples]


def test_steps_and_evaluation_partition_the_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(200))

    steps = [load(path, step=step) for step in (1, 2, 3)]

    trained = [prompts(data.train) for data in steps]
    held_out = prompts(steps[0].eval)
    all_prompts = [*chain(*trained), *held_out]
    assert sorted(all_prompts) == sorted(row["prompt"] for row in pairs(200))
    assert all(prompts(data.eval) == held_out for data in steps)


def test_split_depends_only_on_the_data_seed(tmp_path: Path) -> None:
    rows = pairs(100)
    path = write(tmp_path / "rows.jsonl", rows)
    random.Random(1).shuffle(rows)
    shuffled = write(tmp_path / "shuffled.jsonl", rows)

    first, reordered, other_seed = load(path), load(shuffled, seed=1), load(path, data_seed=1)

    assert fingerprint(first.train) == fingerprint(reordered.train)
    assert prompts(first.eval) == prompts(reordered.eval)
    assert fingerprint(first.train) != fingerprint(other_seed.train)
    assert set(prompts(first.train)) != set(prompts(other_seed.train))
    assert set(prompts(first.eval)) != set(prompts(other_seed.eval))


def test_branches_of_a_conversation_stay_together(tmp_path: Path) -> None:
    branches = [
        {
            "messages": [
                {"role": "user", "content": f"Topic {n} " if branch else f"topic  {n}"},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": f"branch {branch}"},
                {"role": "assistant", "content": "Done."},
            ]
        }
        for n in range(60)
        for branch in range(3)
    ]
    path = write(tmp_path / "rows.jsonl", branches)

    def topics(examples: list[Example]) -> set[str]:
        return {example.prompt[0].content.split()[1] for example in examples}

    data = [load(path, step=step, max_eval_rows=9999) for step in (1, 3)]

    splits = [topics(data[0].train), topics(data[1].train), topics(data[0].eval)]
    assert len(set.union(*splits)) == sum(map(len, splits)) == 60


def test_evaluation_uses_the_test_split(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.jsonl", pairs(50))
    write(tmp_path / "set" / "test.jsonl", [*pairs(5, "held"), *pairs(3)])
    write(tmp_path / "set" / "train_gen.jsonl", pairs(9, "gen"))

    data = load(str(tmp_path / "set"), split=(1.0, 0.0, 0.0))

    assert sorted(prompts(data.eval)) == [*(f"held{n}" for n in range(5)), "q0", "q1", "q2"]
    assert sorted(prompts(data.train)) == sorted(f"q{n}" for n in range(3, 50))
    assert "dropped 3 rows whose prompt is also in the evaluation rows" in data.notes
    assert f"{tmp_path}/set: step 1 reads the split train, and test for evaluation" in data.notes


def test_no_step_trains_on_evaluation_rows_of_another(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(100))

    many = load(path, step=2, split=(1.0, 1.0, 1.0), eval_fraction=0.5, max_eval_rows=50)
    few = load(path, step=1, split=(1.0, 1.0, 1.0), eval_fraction=0.5, max_eval_rows=3)

    assert len(many.eval) > 30
    assert not set(prompts(many.eval)) & set(prompts(few.train))


def test_step_3_uses_each_prompt_once(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*pairs(40), *pairs(40)])

    data = load(path, step=3, split=(0.0, 0.0, 1.0))

    assert len(prompts(data.train)) == len(set(prompts(data.train)))
    assert len(data.train) + len(data.eval) == 40


def test_path_weights_select_shares_without_repeating_rows(tmp_path: Path) -> None:
    evaluation = write(tmp_path / "eval.jsonl", pairs(4, "e"))
    paths = [write(tmp_path / f"{name}.jsonl", pairs(40, name)) for name in "abc"]
    all_in_step_1: dict[str, Any] = {"split": (1.0, 0.0, 0.0), "eval_path": (evaluation,)}

    data = load(f"{paths[0]}:4", f"{paths[1]}:2", paths[2], **all_in_step_1)

    rows = prompts(data.train)
    assert len(set(rows)) == len(rows)
    counts = Counter(prompt[0] for prompt in rows)
    assert counts == {"a": 40, "b": 20, "c": 10}
    assert sorted(prompts(data.eval)) == ["e0", "e1", "e2", "e3"]
    assert [note.split(": ")[1] for note in data.notes if "its weight" in note] == [
        "uses 20 of 40 rows, given its weight",
        "uses 10 of 40 rows, given its weight",
    ]
    assert prompts(load(*paths, **all_in_step_1).train).count("c0") == 1
    few = load(f"{paths[0]}:1000", f"{paths[1]}:1", **all_in_step_1)
    assert Counter(prompt[0] for prompt in prompts(few.train)) == {"a": 40, "b": 1}


def test_evaluation_rows_may_use_default_column_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": f"q{n}", "good": "a"} for n in range(60)])
    held_out = write(tmp_path / "eval.jsonl", pairs(3, "e"))

    data = load(path, eval_path=(held_out,), fields={"prompt": "q", "chosen": "good"})

    assert sorted(prompts(data.eval)) == ["e0", "e1", "e2"]
