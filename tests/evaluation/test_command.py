"""`python -m evaluation` as a user runs it, on a tiny random model."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.__main__ import main
from evaluation.contract import Question, ReadOptions
from evaluation.evaluate import generate_texts
from evaluation.tasks import TASKS
from inference.replica import weights_hash
from inference.settings import Sampling
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.models.hf.load import load_for_inference
from pipeline.system.errors import UserError
from tests.distributed import run_ranks
from tests.families import save_base
from tests.pipeline.data.tokenizers import byte_level


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random model."""
    directory = tmp_path_factory.mktemp("model")
    return save_base(directory, tokenizer=byte_level(bos=True), max_position_embeddings=256)


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 3)
    return path


def run_evaluation(model: Path, out: Path, *options: str) -> dict[str, Any]:
    main(["--path", str(model), "--output", str(out), *options])
    return json.loads(out.read_text())


def test_model_is_evaluated_on_several_tasks(
    model: Path, gsm8k: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--tasks", "gsm8k", "arithmetic", "--data", f"gsm8k={gsm8k}", "--limit", "5")
    options += ("--k", "1", "2", "--samples", "3", "--max-new-tokens", "4")

    results = run_evaluation(model, tmp_path / "evaluation.json", *options)

    figures = results["figures"]
    assert [(row["task"], row["metric"], row["k"]) for row in figures] == [
        ("gsm8k", "strict", 1), ("gsm8k", "strict", 2),
        ("gsm8k", "flexible", 1), ("gsm8k", "flexible", 2),
        ("arithmetic", "correct", 1), ("arithmetic", "correct", 2),
    ]  # fmt: skip
    assert [row["questions"] for row in figures] == [3] * 4 + [5] * 2
    assert all(row["low"] <= row["value"] <= row["high"] for row in figures)
    assert results["weights_hash"] == weights_hash(load_for_inference(model)[0])
    assert results["settings"]["samples"] == 3
    assert results["settings"]["temperature"] == 1.0
    text = (tmp_path / "evaluation.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [len(line["responses"]) for line in lines] == [3] * (3 + 5)
    correct = [grades["correct"][0] for line in lines[3:] for grades in line["grades"]]
    assert figures[4]["value"] == sum(correct) / 15
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["task", "metric", "value", "95%", "interval", "questions"]
    assert table[2].startswith("gsm8k       strict pass@2")


def test_accuracy_is_that_of_the_greedy_responses(model: Path, tmp_path: Path) -> None:
    """Grades are those of the model's own greedy responses."""
    chat, network = load(model)
    sampling = Sampling(max_new_tokens=6, temperature=0.0)
    questions = [Question((Message("user", f"Say {n}"),)) for n in range(3)]
    responses = generate_texts(questions, network, chat, sampling, task="t")
    rows = [{"prompt": f"Say {n}", "answer": str(n)} for n in range(3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    results = run_evaluation(
        model, tmp_path / "out.json", "--tasks", "arithmetic", "--data", f"arithmetic={path}",
        "--max-new-tokens", "6",
    )  # fmt: skip

    correct = [
        TASKS["arithmetic"].grade(Question((), {"answer": row["answer"]}), samples[0])["correct"][0]
        for row, samples in zip(rows, responses, strict=True)
    ]
    assert results["figures"][0]["value"] == pytest.approx(sum(correct) / 3)


def load(model: Path) -> tuple[ChatFormat, Any]:
    network, tokenizer = load_for_inference(model)
    return resolve_format(tokenizer, "auto"), network


def sample_responses(model: Path) -> list[list[str]]:
    chat, network = load(model)
    questions = TASKS["arithmetic"].read(ReadOptions(limit=5))
    sampling = Sampling(max_new_tokens=6, temperature=1.0, seed=3)
    return generate_texts(questions, network, chat, sampling, task="arithmetic", num_samples=2)


def test_two_processes_sample_the_same_responses_as_one(model: Path) -> None:
    expected = sample_responses(model)

    assert run_ranks(sample_responses, model) == [expected, expected]
    assert len(set(map(tuple, expected))) > 1


EMBEDDED_TASK = ("--path", "embedded", "--tasks", "embedded")
REJECTED = {
    "--path is missing": ["--tasks", "embedded"],
    "--tasks is missing": ["--path", "embedded"],
    "no task embeded; did you mean embedded": ["--path", "embedded", "--tasks", "embeded"],
    "--data gsm8k=PATH": ["--path", "embedded", "--tasks", "gsm8k"],
    "two paths for gsm8k": ["--path", "a", "--tasks", "gsm8k", "--data", "gsm8k=a", "gsm8k=b"],
    "no such file or directory": ["--path", "a", "--tasks", "gsm8k", "--data", "gsm8k=none.jsonl"],
    "--k 4 needs that many responses per": [*EMBEDDED_TASK, "--k", "1", "4", "--samples", "2"],
    "gives the same response 4 times": [*EMBEDDED_TASK, "--k", "4", "--temperature", "0"],
    "--shots is only for gsm8k": [*EMBEDDED_TASK, "--shots", "8"],
    "names the file of responses": [*EMBEDDED_TASK, "--output", "x.jsonl"],
    "/no/such": ["--path", "/no/such", "--tasks", "embedded"],
}


@pytest.mark.parametrize("message", REJECTED)
def test_wrong_input_is_rejected_with_its_name(message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(REJECTED[message])
