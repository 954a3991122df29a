import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DataConfig
from pipeline.data.examples import Example
from pipeline.data.sharing.prompts import fingerprint
from pipeline.data.sharing.steps import StageData, load_examples
from pipeline.errors import DataError


def write(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(count: int, name: str = "q") -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{n}", "chosen": "good", "rejected": "bad"} for n in range(count)]


def demonstrations(count: int, name: str = "d") -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{n}", "response": "good"} for n in range(count)]


def load(
    *paths: str, step: int = 1, seed: int = 0, data_seed: int = 0, **settings: Any
) -> StageData:
    config = DataConfig(path=paths, seed=data_seed, **settings)
    return load_examples(config, step=step, seed=seed)


def refused(*paths: str, step: int = 1, **settings: Any) -> str:
    with pytest.raises(DataError) as raised:
        load(*paths, step=step, **settings)
    return str(raised.value)


def prompts(examples: list[Example]) -> list[str]:
    return [example.prompt[-1].content for example in examples]


def example_text(example: Example) -> str:
    return (example.prompt or example.chosen)[-1].content


def test_the_steps_and_the_evaluation_share_no_row_and_lose_none(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(200))

    steps = [load(path, step=step) for step in (1, 2, 3)]

    parts = [prompts(data.train) for data in steps]
    held_out = prompts(steps[0].eval)
    everything = [prompt for part in (*parts, held_out) for prompt in part]
    assert sorted(everything) == sorted(row["prompt"] for row in pairs(200))
    assert all(prompts(data.eval) == held_out for data in steps)


def test_rows_follow_from_the_datas_seed_alone(tmp_path: Path) -> None:
    rows = pairs(100)
    path = write(tmp_path / "rows.jsonl", rows)
    random.Random(1).shuffle(rows)
    shuffled = write(tmp_path / "shuffled.jsonl", rows)

    first, again, other = load(path), load(shuffled, seed=1), load(path, data_seed=1)

    assert fingerprint(first.train) == fingerprint(again.train)
    assert prompts(first.eval) == prompts(again.eval)
    assert fingerprint(first.train) != fingerprint(other.train)
    assert set(prompts(first.train)) != set(prompts(other.train))
    assert set(prompts(first.eval)) != set(prompts(other.eval))


def test_neither_more_rows_nor_more_paths_move_a_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(300))
    grown = write(tmp_path / "grown.jsonl", [*pairs(300), *pairs(2000, "new")])
    more = write(tmp_path / "more.jsonl", demonstrations(100))

    for step in (1, 2, 3):
        old = load(path, step=step, max_eval_rows=9999)
        for paths in ((grown,), (path, more), (more, path)):
            new = load(*paths, step=step, max_eval_rows=9999)
            assert [p for p in prompts(new.train) if p[0] == "q"] == prompts(old.train)
            assert sorted(p for p in prompts(new.eval) if p[0] == "q") == sorted(prompts(old.eval))


def test_the_parts_are_in_proportion_to_the_split(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(4000))

    data = [
        load(path, step=step, split=(1.0, 1.0, 8.0), eval_fraction=0.2, max_eval_rows=9999)
        for step in (1, 2, 3)
    ]

    # 3,200 rows are not held out: 320, 320 and 2,560; the standard deviations are 17, 17 and 30.
    assert len(data[0].eval) == pytest.approx(800, abs=100)
    assert [len(part.train) for part in data] == [
        pytest.approx(320, abs=70),
        pytest.approx(320, abs=70),
        pytest.approx(2560, abs=200),
    ]


def test_a_conversations_branches_stay_together(tmp_path: Path) -> None:
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

    sides = [topics(data[0].train), topics(data[1].train), topics(data[0].eval)]
    assert len(set.union(*sides)) == sum(map(len, sides)) == 60


def test_a_prompt_with_rows_of_several_kinds_goes_to_one_step(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*pairs(300), *demonstrations(300, "q")])

    data = [load(path, step=step) for step in (1, 2, 3)]

    parts = [set(prompts(part.train)) for part in data]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 300 - len(set(prompts(data[0].eval)))


def test_rows_that_only_some_steps_can_use_are_shared_by_those(tmp_path: Path) -> None:
    texts = write(tmp_path / "texts.jsonl", ({"text": f"text {n}"} for n in range(100)))
    prompt_only = write(tmp_path / "prompts.jsonl", ({"prompt": f"p{n}"} for n in range(100)))
    preference = write(tmp_path / "pairs.jsonl", pairs(100))

    data = [
        load(texts, prompt_only, preference, step=step, max_eval_rows=999) for step in (1, 2, 3)
    ]

    # The texts that are left go to step 1, the prompts to step 3.
    held_out = len({*map(example_text, (*data[0].eval, *data[2].eval))})
    assert sum(len(part.train) for part in data) == 300 - held_out
    assert sum(not example.prompt for example in data[0].train) > 80
    assert all(example.rejected for example in data[1].train)
    assert sum(not example.chosen for example in data[2].train) > 80
    assert any("lack what step 2 needs" in note for note in data[1].notes)


def test_the_test_split_is_the_evaluation(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.jsonl", pairs(50))
    write(tmp_path / "set" / "test.jsonl", [*pairs(5, "held"), *pairs(3)])

    data = load(str(tmp_path / "set"), split=(1.0, 0.0, 0.0))

    assert sorted(prompts(data.eval)) == [*(f"held{n}" for n in range(5)), "q0", "q1", "q2"]
    assert sorted(prompts(data.train)) == sorted(f"q{n}" for n in range(3, 50))
    assert "left out 3 rows whose prompt is in the evaluation rows" in data.notes


def test_eval_path_is_the_evaluation(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(20))
    held_out = write(tmp_path / "held.jsonl", pairs(4, "held"))

    data = load(path, split=(1.0, 0.0, 0.0), eval_path=(held_out,))

    assert sorted(prompts(data.eval)) == ["held0", "held1", "held2", "held3"]
    assert len(data.train) == 20


def test_max_eval_rows_bounds_what_is_evaluated_not_what_is_cut(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(100))
    held_out = write(tmp_path / "held.jsonl", pairs(40, "held"))

    cut = load(path, split=(1.0, 0.0, 0.0), eval_fraction=0.5, max_eval_rows=7)
    given = load(path, split=(1.0, 0.0, 0.0), eval_path=(held_out,), max_eval_rows=7)

    whole = load(path, split=(1.0, 0.0, 0.0), eval_fraction=0.5, max_eval_rows=100)
    assert (len(cut.eval), len(cut.train)) == (7, 100 - len(whole.eval))
    assert prompts(cut.eval) == prompts(whole.eval)[:7]
    assert (len(given.eval), len(given.train)) == (7, 100)


def test_no_step_trains_on_what_another_evaluates(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", pairs(100))

    many = load(path, step=2, split=(1.0, 1.0, 1.0), eval_fraction=0.5, max_eval_rows=50)
    few = load(path, step=1, split=(1.0, 1.0, 1.0), eval_fraction=0.5, max_eval_rows=3)

    assert len(many.eval) > 30
    assert not set(prompts(many.eval)) & set(prompts(few.train))


def test_step_3_sees_each_prompt_once(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*pairs(40), *pairs(40)])

    data = load(path, step=3, split=(0.0, 0.0, 1.0))

    assert len(prompts(data.train)) == len(set(prompts(data.train)))
    assert len(data.train) + len(data.eval) == 40


def test_weights_are_shares_of_the_mixture(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", demonstrations(300, "a"))
    second = write(tmp_path / "b.jsonl", demonstrations(90, "b"))
    held_out = write(tmp_path / "held.jsonl", demonstrations(5, "held"))

    data = load(f"{first}:1", f"{second}:3", split=(1.0, 0.0, 0.0), eval_path=(held_out,))

    names = [prompt[0] for prompt in prompts(data.train)]
    assert (names.count("a"), names.count("b")) == (30, 90)
    assert f"{first}: 30 of 300 rows, by its weight" in data.notes


def test_a_step_without_usable_rows_names_the_first_row(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", demonstrations(20))

    message = refused(path, step=2)

    assert message.startswith("no row has what step 2 needs, a chosen and a rejected response")
    assert f"{path} line " in message
    assert "has a prompt and a response: give" in message
    assert message.endswith("with --fields, or choose the steps with --step, without 2")


def test_rows_that_share_one_prompt_can_not_be_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*pairs(1), *pairs(1)])

    assert "share one prompt, so none can be held out" in refused(path)
