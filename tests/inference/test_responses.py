"""Responses to a file of prompts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference.engine.requests import Response
from inference.generate import main
from inference.responses import Prompt, Responder, TextResponse, read_prompts, write_responses
from inference.settings import Sampling
from pipeline.data.examples import Message
from pipeline.models.hf.load import load_for_inference
from pipeline.system.errors import ConfigError, DataError
from tests.pipeline.export.models import save_embedded

PROMPTS = ["What is 3 plus 4?", "Hi", "Name a colour.", "Spell cat.", "Is 5 even?"]


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, list]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def make_responder(embedded: tuple) -> Callable[..., Responder]:
    """A factory of responders with the embedded model."""

    def make(*, temperature: float = 0.0, **settings: object) -> Responder:
        sampling = Sampling(max_new_tokens=10, temperature=temperature)
        return Responder(*embedded, sampling, **settings)

    return make


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    return read_prompts(write_rows(tmp_path / "in.jsonl", [{"prompt": text} for text in PROMPTS]))


def test_command_writes_responses_in_input_order(tmp_path: Path) -> None:
    dialogue = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "Hi"}, {"messages": dialogue}])
    out = tmp_path / "new" / "out.jsonl"

    main(["--path", "embedded", "--prompts", str(path), "--out", str(out),
          "--max-new-tokens", "5", "--samples", "2", "--temperature", "1"])  # fmt: skip

    rows = read_rows(out)
    assert [row["prompt"] for row in rows] == ["Hi", dialogue]
    for row in rows:
        assert len(row["answers"]) == len(row["stop"]) == 2
        assert set(row["stop"]) <= {"eos", "length"}
        for ids, logprobs in zip(row["token_ids"], row["logprobs"], strict=True):
            assert 1 <= len(ids) == len(logprobs) <= 5
            assert all(logprob <= 0 for logprob in logprobs)
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]
    with pytest.raises(ConfigError, match="is also an input"):
        main(["--path", "embedded", "--prompts", str(path), "--out", str(path)])


def test_weights_have_the_requested_precision(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "Hi"}])
    logprobs: list[list[float]] = []
    for precision in ("fp32", "bf16"):
        out = tmp_path / f"{precision}.jsonl"
        main(["--path", "embedded", "--prompts", str(path), "--out", str(out),
              "--max-new-tokens", "1", "--precision", precision])  # fmt: skip
        logprobs += read_rows(out)[0]["logprobs"]

    assert logprobs[0] != logprobs[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.1)


def test_messages_are_parsed_like_training_rows(tmp_path: Path) -> None:
    row = {
        "messages": [{"from": "human", "value": "Q"}, {"from": "observation", "value": "22"}],
        "tools": [{"name": "weather"}],
    }
    (prompt,) = read_prompts(write_rows(tmp_path / "in.jsonl", [row]))

    tools = {"tools": [{"type": "function", "function": {"name": "weather"}}]}
    assert prompt.messages == (Message("user", "Q", keys=json.dumps(tools)), Message("tool", "22"))
    assert prompt.value == row["messages"]


def test_killed_run_resumes_after_its_last_complete_line(
    tmp_path: Path, make_responder: Callable[..., Responder], prompts: list[Prompt]
) -> None:
    responder = make_responder(temperature=1.0)
    full, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_responses(responder, prompts, full, model_path="embedded", batch_size=2)
    first, second, third, *_ = full.read_bytes().splitlines(keepends=True)
    marked = first.replace(b'"prompt"', b'"kept": true, "prompt"')
    partial = tmp_path / f"resumed.jsonl.{responder.fingerprint(prompts, 'embedded')}.partial"
    partial.write_bytes(marked + second + third[:20])

    write_responses(responder, prompts, resumed, model_path="embedded", batch_size=2)

    expected, actual = read_rows(full), read_rows(resumed)
    assert actual[0].pop("kept")
    for row, expected_row in zip(actual, expected, strict=True):
        # Batches have different rows, so rounding may differ.
        assert row.pop("logprobs")[0] == pytest.approx(expected_row.pop("logprobs")[0], abs=1e-5)
        assert row == expected_row
    assert not partial.exists()


def test_generation_stops_at_a_stop_string(
    make_responder: Callable[..., Responder], prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_responder()
    token_ids = plain.encode(prompts[0])
    ((full,),) = plain.responses([token_ids], first_row=0, batch_size=1)
    stopping = make_responder(stop_strings=[full.text[2:4]])
    lengths: list[int] = []
    finish = stopping.finish

    def record(prompt: list[int], response: Response) -> TextResponse:
        lengths.append(len(response.ids))
        return finish(prompt, response)

    monkeypatch.setattr(stopping, "finish", record)
    ((stopped,),) = stopping.responses([token_ids], first_row=0, batch_size=1)

    assert lengths == [len(stopped.token_ids)]
    assert len(stopped.token_ids) < len(full.token_ids)


@pytest.mark.parametrize(
    ("raw", "full_text", "stopped_text"), [(True, " ab  cd ", " ab "), (False, "ab  cd", "ab")]
)
def test_chat_text_is_stripped_and_raw_text_is_not(
    make_responder: Callable[..., Responder], raw: bool, full_text: str, stopped_text: str
) -> None:
    ids = make_responder().tokenizer(" ab  cd ", add_special_tokens=False)["input_ids"]
    for stopped, stop in ((True, "eos"), (False, "length")):
        response = Response([*ids, 2], [0.0] * (len(ids) + 1), stopped=stopped)
        assert make_responder(raw=raw).finish([1], response).text == full_text
        assert make_responder(raw=raw).finish([1], response).stop == stop
    cut_response = make_responder(raw=raw, stop_strings=["d", " cd"]).finish([1], response)
    assert (cut_response.text, cut_response.stop) == (stopped_text, "stop_string")
    assert len(cut_response.token_ids) == len(cut_response.logprobs) < len(ids)


def test_raw_text_does_not_get_a_second_bos_token(make_responder: Callable[..., Responder]) -> None:
    first, second = (Prompt(text, (), text, "line 1") for text in ("Hi", "<s>Hi"))
    assert make_responder(raw=True).encode(first) == make_responder(raw=True).encode(second)


def transformers_greedy(directory: Path, ids: list[int]) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    return model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False)[0].tolist()


@pytest.mark.parametrize(
    ("file", "raw"), [("generation_config.json", False), ("config.json", True)]
)
def test_response_ends_where_transformers_generate_ends(
    file: str, raw: bool, tmp_path: Path, prompts: list[Prompt]
) -> None:
    save_embedded(tmp_path)
    settings = Sampling(max_new_tokens=10, temperature=0.0)
    ids = Responder(*load_for_inference(tmp_path), settings, raw=raw).encode(prompts[0])
    end_id = transformers_greedy(tmp_path, ids)[len(ids) + 4]  # this ends nothing by default
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
    stored = json.loads((tmp_path / file).read_text()) | {"eos_token_id": [2, end_id]}
    (tmp_path / file).write_text(json.dumps(stored))

    responder = Responder(*load_for_inference(tmp_path), settings, raw=raw)
    ((response,),) = responder.responses([ids], first_row=0, batch_size=1)

    assert ids + response.token_ids == transformers_greedy(tmp_path, ids)
    assert response.stop == "eos"
    # The token that ended it is an ordinary word, which is not part of the response.
    text = responder.tokenizer.decode(response.token_ids[:-1], skip_special_tokens=True)
    assert response.text.strip() == text.strip()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not valid JSON"),
        ("9" * 5000, "line 2 is not valid JSON"),
        ('{"prompt": "\\ud83d"}', "line 2 has '\\ud83d', an unpaired surrogate"),
        ("[]", 'line 2 must be an object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "line 2 must be an object with either"),
        ('{"prompt": 3}', 'line 2: "prompt" must be text'),
        ('{"messages": []}', "line 2: the last message must be from the user"),
        ('{"messages": [{"role": "cook", "content": "x"}]}', "line 2: a turn in messages must be"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "there is no user message"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls":'
            ' [{"name": "a"}]}]}',
            "line 2: the last message must be from the user or a tool",
        ),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('\ufeff{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")

    with pytest.raises(DataError) as error:
        read_prompts(path)

    assert str(path) in str(error.value)
    assert message in str(error.value)
    path.write_text("\n")
    with pytest.raises(DataError, match="has no prompts"):
        read_prompts(path)
