"""Best answers as data to learn from."""

import json
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.examples import Example, Message
from pipeline.data.rows.reading import RowReader, Wanted
from pipeline.models.export import export
from pipeline.models.load import load_reward_for_inference
from pipeline.models.reward_model import score_responses
from rewards.select import main, select
from rewards.selection import Candidate, SelectConfig, best, best_of_n_kl
from tests.families import tiny_causal_lm
from tests.pipeline.data.tokenizers import byte_level


def candidates(*rewards: float | None) -> list[Candidate]:
    return [Candidate(f"answer {number}", reward) for number, reward in enumerate(rewards)]


def test_the_first_of_the_best_is_chosen_and_an_unknown_reward_is_no_0() -> None:
    chosen = best(candidates(None, -2.0, -1.0, -1.0))

    assert chosen == Candidate("answer 2", -1.0)
    assert best(candidates(None, None)) is None


@pytest.mark.parametrize("probabilities", [(0.5, 0.3, 0.2), (0.25,) * 4, (0.9, 0.1)])
def test_the_kl_of_the_best_of_n_is_at_most_the_bound(probabilities: tuple[float, ...]) -> None:
    """By enumeration, the first answer being the best; of many equal ones it is nearly reached."""
    for n in (1, 2, 3, 4):
        chosen = [0.0] * len(probabilities)
        for draw in product(range(len(probabilities)), repeat=n):
            chosen[min(draw)] += math.prod(probabilities[place] for place in draw)
        kl = sum(c * math.log(c / p) for c, p in zip(chosen, probabilities, strict=True))

        assert -1e-12 <= kl <= best_of_n_kl(n) + 1e-12

    assert best_of_n_kl(1) == 0
    # Of 10,000 answers of one probability, the best of 4 is as far as the bound but for 1 / 10,000.
    count = 10_000
    shares = [((count - at) / count) ** 4 - ((count - at - 1) / count) ** 4 for at in range(count)]
    assert sum(c * math.log(c * count) for c in shares) == pytest.approx(best_of_n_kl(4), abs=1e-3)


@dataclass(frozen=True)
class World:
    """All answers that a prompt can have."""

    probabilities: tuple[float, ...]
    answers: tuple[Candidate, ...]


UNLIKE = World((0.5, 0.3, 0.15, 0.05), tuple(candidates(0.0, 1.0, 2.0, 3.0)))
WORLDS = {
    "no two alike": UNLIKE,
    "rare is bad": World((0.05, 0.15, 0.3, 0.5), UNLIKE.answers),
    "ties": World((0.4, 0.3, 0.2, 0.1), tuple(candidates(0.0, 1.0, 1.0, 0.0))),
    "all equal": World((0.7, 0.3), tuple(candidates(1.0, 1.0))),
    "unknown": World((0.3, 0.3, 0.2, 0.2), tuple(candidates(None, 1.0, None, 2.0))),
    "cut off": World(
        (0.2, 0.3, 0.4, 0.1),
        (
            Candidate("a", 5.0, stopped=False),
            Candidate("b", 0.0),
            Candidate(" ", 4.0),
            Candidate("d", 1.0),
        ),
    ),
}


def rows_of_all_draws(world: World, n: int, **settings: Any) -> tuple[float, float]:
    """The probability that a prompt gives a row, and KL(what rows have || the world), exactly."""
    config = SelectConfig(path="x", prompts="x", reward=("math",), best_of=n, **settings)
    prompt = Example((Message("user", "Hi"),))
    mass: dict[str, float] = {}
    for draw in product(range(len(world.answers)), repeat=n):
        rows, _ = select([prompt], [[world.answers[place] for place in draw]], config)
        if rows:
            last = rows[0]["messages" if config.write == "demonstrations" else "chosen"][-1]
            chance = math.prod(world.probabilities[place] for place in draw)
            mass[last["content"]] = mass.get(last["content"], 0.0) + chance
    kept = math.fsum(mass.values())
    drawn = {
        each.text: chance for each, chance in zip(world.answers, world.probabilities, strict=True)
    }
    kl = math.fsum(m / kept * math.log(m / kept / drawn[text]) for text, m in mass.items())
    return kept, kl


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "a low reward": {"min_reward": 1.0},
    "the best alone": {"min_reward": 2.0},
    "pairs": {"write": "pairs"},
    "pairs of high reward": {"write": "pairs", "min_reward": 1.0},
}


@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("name", WORLDS)
def test_what_is_written_is_never_farther_than_the_bound(name: str, filtered: str) -> None:
    """By enumeration of every draw, through the choice that the command makes."""
    for n in (2, 3, 4):
        kept, kl = rows_of_all_draws(WORLDS[name], n, **FILTERS[filtered])
        if kept:
            assert -1e-12 <= kl <= best_of_n_kl(n, kept) + 1e-12


def test_the_bound_is_reached_where_no_two_answers_are_alike() -> None:
    """With 20,000 answers of one probability, of which the best of 4 is kept where it is high."""
    n, count = 4, 20_000
    for first in (5_000, 16_000, 19_800):
        shares = [((at + 1) / count) ** n - (at / count) ** n for at in range(first, count)]
        kept = math.fsum(shares)
        kl = math.fsum(each / kept * math.log(each / kept * count) for each in shares)
        assert kl == pytest.approx(best_of_n_kl(n, kept), abs=1e-3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of prompts, and the directory of a tiny model."""
    dialogue = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    rows = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(3)]
    tokenizer = byte_level(bos=True)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    tiny_causal_lm("llama", **sizes).save_pretrained(tmp_path / "model")
    path = tmp_path / "prompts.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in (*rows, {"messages": dialogue}))
    path.write_text(text)
    return path


HOT = ("--temperature", "50", "--best-of", "12", "--max-new-tokens", "48", "--workers", "1")
"""Nearly uniform tokens, of which some end an answer."""

SHORT = "{kind: length, max_tokens: 0, buffer_tokens: 48}"


def selected(prompts: Path, *words: str) -> list[dict[str, Any]]:
    out, model = prompts.with_name("selected.jsonl"), prompts.with_name("model")
    main([*HOT, "--path", str(model), "--prompts", str(prompts), "--output", str(out), *words])
    return [json.loads(line) for line in out.read_text().splitlines()]


def read_by(step: int, path: Path) -> list[Example]:
    """The rows as a step reads them."""
    (rows,) = RowReader().read((str(path),), Wanted({}), step=step, notes=[])
    return rows.train


def test_demonstrations_are_the_best_and_step_1_reads_them(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = selected(prompts, "--reward", SHORT)

    assert rows
    assert all(-1 <= row["reward"] < 0 for row in rows)
    assert [turn["role"] for turn in rows[-1]["messages"]][-1] == "assistant"
    printed = capsys.readouterr().out
    assert f"chosen      {len(rows)} demonstrations" in printed
    away = "the best of 12 are at most 1.568 nats from the model at temperature 50: log 12 - 11/12"
    assert len(rows) == 4
    assert away in printed
    read = read_by(1, prompts.with_name("selected.jsonl"))
    assert [each.chosen[-1].content for each in read] == [
        row["messages"][-1]["content"] for row in rows
    ]


def test_pairs_are_the_best_and_the_worst_and_step_2_reads_them(prompts: Path) -> None:
    rows = selected(prompts, "--reward", SHORT, "--write", "pairs")

    assert rows
    assert all(row["reward_chosen"] > row["reward_rejected"] for row in rows)
    read = read_by(2, prompts.with_name("selected.jsonl"))
    assert [(each.chosen[-1].content, each.rejected[-1].content) for each in read] == [
        (row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows
    ]
    assert {each.margin for each in read} == {None}


def test_a_reward_model_scores_what_it_would_alone(prompts: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward"
    export(*load_reward_for_inference(tmp_path / "model"), reward)
    taste = json.dumps({"kind": "model", "path": str(reward), "weight": 2.0})

    rows = selected(prompts, "--reward", taste)

    for row in rows:
        prompt = [Message(turn["role"], turn["content"]) for turn in row["messages"][:-1]]
        (score,) = score_responses(str(reward), [(prompt, row["messages"][-1]["content"])])
        assert row["reward"] == pytest.approx(2 * score, abs=1e-5)
