"""`python -m evaluation`, as a user runs it, on a tiny model made on the spot."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.__main__ import main
from evaluation.contract import Question, Reading
from evaluation.evaluate import responses_to
from evaluation.tasks import TASKS
from inference.replica import weights_hash
from inference.settings import Sampling
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.models.hf.load import load_for_inference
from pipeline.system.errors import UserError
from tests.distributed import run_ranks
from tests.families import tiny_causal_lm
from tests.pipeline.data.tokenizers import byte_level


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level(bos=True)
    tokenizer.save_pretrained(directory)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    tiny_causal_lm("llama", **size).save_pretrained(directory)
    return directory


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 3)
    return path


def evaluated(model: Path, out: Path, *words: str) -> dict[str, Any]:
    main(["--path", str(model), "--output", str(out), *words])
    return json.loads(out.read_text())


def test_a_model_is_evaluated_on_several_tasks(
    model: Path, gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--tasks", "gsm8k", "arithmetic", "--data", f"gsm8k={gsm8k}", "--limit", "5")
    words += ("--k", "1", "2", "--samples", "3", "--max-new-tokens", "4")

    found = evaluated(model, tmp_path / "evaluation.json", *words)

    figures = found["figures"]
    assert [(each["task"], each["metric"], each["k"]) for each in figures] == [
        ("gsm8k", "strict", 1), ("gsm8k", "strict", 2),
        ("gsm8k", "flexible", 1), ("gsm8k", "flexible", 2),
        ("arithmetic", "correct", 1), ("arithmetic", "correct", 2),
    ]  # fmt: skip
    assert [each["questions"] for each in figures] == [3] * 4 + [5] * 2
    assert all(each["low"] <= each["value"] <= each["high"] for each in figures)
    assert found["weights_hash"] == weights_hash(load_for_inference(model)[0])
    assert found["settings"]["samples"] == 3
    assert found["settings"]["temperature"] == 1.0
    text = (tmp_path / "evaluation.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [len(line["responses"]) for line in lines] == [3] * (3 + 5)
    right = [grades["correct"][0] for line in lines[3:] for grades in line["grades"]]
    assert figures[4]["value"] == sum(right) / 15
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["task", "metric", "value", "95", "%", "interval", "questions"]
    assert table[2].startswith("gsm8k       strict pass@2")


def test_the_right_answers_are_found_in_the_answers(model: Path, tmp_path: Path) -> None:
    """A task whose answers are what the model says is solved, and by other answers not at all."""
    chat, network = loaded(model)
    sampling = Sampling(max_new_tokens=6, temperature=0.0)
    questions = [Question((Message("user", f"Say {n}"),)) for n in range(3)]
    given = responses_to(questions, network, chat, sampling, task="t")
    solved = [{"prompt": f"Say {n}", "answer": str(n)} for n in range(3)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in solved))

    found = evaluated(
        model, tmp_path / "out.json", "--tasks", "arithmetic", "--data", f"arithmetic={rows}",
        "--max-new-tokens", "6",
    )  # fmt: skip

    right = [
        TASKS["arithmetic"].grade(Question((), {"answer": row["answer"]}), each[0])["correct"][0]
        for row, each in zip(solved, given, strict=True)
    ]
    assert found["figures"][0]["value"] == pytest.approx(sum(right) / 3)


def loaded(model: Path) -> tuple[ChatFormat, Any]:
    network, tokenizer = load_for_inference(model)
    return resolve_format(tokenizer, "auto"), network


def sampled(model: Path) -> list[list[str]]:
    chat, network = loaded(model)
    questions = TASKS["arithmetic"].read(Reading(limit=5))
    sampling = Sampling(max_new_tokens=6, temperature=1.0, seed=3)
    return responses_to(questions, network, chat, sampling, task="arithmetic", num_samples=2)


def test_two_processes_draw_the_answers_of_one(model: Path) -> None:
    alone = sampled(model)

    assert run_ranks(sampled, model) == [alone, alone]
    assert len({tuple(each) for each in alone}) > 1


WRONG = {
    "--path is missing": ["--tasks", "embedded"],
    "--tasks is missing": ["--path", "embedded"],
    "no task embeded; did you mean embedded": ["--path", "embedded", "--tasks", "embeded"],
    "--data gsm8k=PATH": ["--path", "embedded", "--tasks", "gsm8k"],
    "no such file or directory": [
        *("--path", "embedded", "--tasks", "gsm8k", "--data", "gsm8k=none.jsonl"),
    ],
    "--k 4 needs that many responses per": [
        *("--path", "embedded", "--tasks", "embedded", "--k", "1", "4", "--samples", "2"),
    ],
    "gives the same response 4 times": [
        *("--path", "embedded", "--tasks", "embedded", "--k", "4", "--temperature", "0"),
    ],
    "--shots is for gsm8k": ["--path", "embedded", "--tasks", "embedded", "--shots", "8"],
    "/no/such": ["--path", "/no/such", "--tasks", "embedded"],
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_input_is_named(sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        main(WRONG[sentence])
