"""Validation of requests, echoed log-probabilities, and ratings by HTTP."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inference.ratings import RatingsFile, read_ratings
from inference.serve.completions import MIN_LOGPROB
from inference.text import encode_text
from tests.inference.serve.serving import (
    CHAT,
    COMPLETIONS,
    LiveServer,
    get,
    post,
    serving,
    stream_events,
)
from tests.inference.serve.test_openai_client import transformers_copy

TURN = {"role": "user", "content": "Hi"}
TOOL_CALLS = {"role": "assistant", "content": "", "tool_calls": [{}]}
DIALOGUE = [TURN, {"role": "assistant", "content": "Yes"}]
RATED = [{"model": "tiny", "text": text} for text in ("short", "longer")]
NAMES = ("tokens", "token_logprobs", "top_logprobs")
PAIR: dict[str, Any] = {"kind": "pair", "messages": [TURN], "answers": RATED, "choice": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(max_n=3, max_tokens_default=5) as running:
        running.state.ratings = RatingsFile(tmp_path_factory.mktemp("ratings") / "ratings.jsonl")
        yield running


def completion_texts(server: LiveServer, **fields: Any) -> list[str]:
    response = post(server, COMPLETIONS, {"prompt": "Hi", "temperature": 0, **fields})
    assert response.status == 200, response.body
    return [choice["text"] for choice in response.json["choices"]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[5], []]}, "prompt"),
        (COMPLETIONS, {"prompt": [100000]}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 999}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "Hi " * 999}]}, "messages"),
        (COMPLETIONS, {"prompt": "Hi", "n": 4}, "n"),
        (COMPLETIONS, {"prompt": ["Hi"] * 400, "n": 3}, "n"),
        (COMPLETIONS, {"prompt": "Hi", "n": 4, "echo": True, "max_tokens": 0}, "n"),
        (COMPLETIONS, {"prompt": "Hi", "n": 2, "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        (COMPLETIONS, {"prompt": "Hi", "logit_bias": {"100000": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "Hi", "stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"prompt": "Hi", "stop_token_ids": [7]}, "stop_token_ids"),
        (CHAT, {"messages": [TURN] * 1025}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [TURN | {"content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [TURN, TOOL_CALLS, TURN]}, "messages"),
        (CHAT, {"messages": DIALOGUE}, "messages"),
        (CHAT, {"messages": DIALOGUE[1:], "continue_final_message": True}, "messages"),
        ("/tokenize", {"messages": DIALOGUE[1:]}, "messages"),
        (CHAT, {"messages": [TURN], "continue_final_message": True}, "messages"),
        (
            CHAT,
            {"messages": DIALOGUE, "continue_final_message": True, "add_generation_prompt": True},
            None,
        ),
        (CHAT, {"messages": [TURN], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "Hi", "messages": [TURN]}, "prompt"),
        ("/api/ratings", {**PAIR, "messages": DIALOGUE}, None),
        ("/api/ratings", {**PAIR, "answers": RATED[:1]}, None),
        ("/api/ratings", {**PAIR, "kind": "thumb"}, None),
        ("/api/ratings", {**PAIR, "kind": "thumb", "answers": RATED[:1], "choice": None}, None),
        ("/api/ratings", {**PAIR, "tie": True}, None),
        ("/api/ratings", {**PAIR, "edit": "x"}, None),
        ("/api/ratings", {**PAIR, "kind": "edit", "answers": RATED[:1]}, None),
    ],
)
def test_invalid_request_names_its_field(
    server: LiveServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = post(server, path, body)

    assert (response.status, response.error["param"]) == (400, param)
    assert response.error["type"] == "invalid_request_error"
    assert "should be a valid" not in response.error["message"]  # no type is wrong


def test_prompt_and_response_must_fit_in_the_context(server: LiveServer) -> None:
    served = server.state.models["tiny"]
    prompt = [5] * (served.context - 3)

    assert len(completion_texts(server, prompt=prompt, max_tokens=3)) == 1
    for offset, tokens in (-3, 4), (0, 1), (1, None):
        body = {"prompt": [5] * (served.context + offset), "max_tokens": tokens}
        assert post(server, COMPLETIONS, body).error["code"] == "context_length_exceeded"
    full = {"prompt": [5] * served.context, "max_tokens": 0, "echo": True}
    assert post(server, COMPLETIONS, full).status == 200
    assert post(server, COMPLETIONS, full | {"prompt": [5] * (served.context + 1)}).status == 400


def test_response_has_the_requested_or_default_length(server: LiveServer) -> None:
    bias = {"logit_bias": {"40": 100}, "return_token_ids": True}

    def lengths(path: str, **fields: Any) -> list[int]:
        response = post(server, path, {"temperature": 0, **bias, **fields}).json
        rows = [choice["token_ids"] for choice in response["choices"]]
        assert {token for row in rows for token in row} == {40}
        assert response["usage"]["completion_tokens"] == sum(map(len, rows))
        return list(map(len, rows))

    assert lengths(COMPLETIONS, prompt=["Hi", "He"], n=3, best_of=3) == [16] * 6
    assert lengths(COMPLETIONS, prompt="Hi", max_tokens=7, min_tokens=7) == [7]
    assert lengths(CHAT, messages=[TURN]) == [5]
    assert lengths(CHAT, messages=[TURN], max_tokens=3) == [3]
    assert lengths(CHAT, messages=[TURN], max_tokens=3, max_completion_tokens=2) == [2]
    answered = {"messages": DIALOGUE, "max_tokens": 2}
    assert lengths(CHAT, **answered, continue_final_message=True) == [2]
    assert lengths(CHAT, **answered, add_generation_prompt=False) == [2]


def test_top_p_0_selects_the_most_likely_tokens(server: LiveServer) -> None:
    assert completion_texts(server, temperature=1, top_p=0) == completion_texts(server)


def test_echoed_log_probabilities_match_transformers(server: LiveServer) -> None:
    served = server.state.models["tiny"]
    prompt, fields = "The sun", {"max_tokens": 4, "echo": True, "logprobs": 2, "seed": 1}
    ids = torch.tensor([encode_text(served.tokenizer, prompt)])
    with torch.no_grad():
        expected = transformers_copy(served)(ids).logits.log_softmax(-1)[0, :-1]
    echo_only, with_response = (
        post(server, COMPLETIONS, {"prompt": prompt, **fields, "max_tokens": tokens}).json
        for tokens in (0, 4)
    )

    counts = {name: count for name, count in echo_only["usage"].items() if isinstance(count, int)}
    length = ids.shape[1]
    assert counts == {"prompt_tokens": length, "completion_tokens": 0, "total_tokens": length}
    (choice,), (longer,) = echo_only["choices"], with_response["choices"]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    assert longer["text"].startswith(prompt)
    for logprobs in (choice["logprobs"], longer["logprobs"]):
        target = [row[token].item() for row, token in zip(expected, ids[0, 1:], strict=True)]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:length] == pytest.approx(target, abs=1e-4)
        top = [sorted(t.values())[::-1][:2] for t in logprobs["top_logprobs"][1:length]]
        assert torch.tensor(top).allclose(expected.topk(2).values, atol=1e-4)
        for token, logprob, alternatives in list(zip(*map(logprobs.get, NAMES), strict=True))[1:]:
            assert alternatives[token] == logprob
        assert logprobs["text_offset"][:length] == [0, 0, 3]  # the first token has no text
        assert logprobs["tokens"][:length] == ["<s>", "The", " sun"]
    assert len(longer["logprobs"]["tokens"]) == length + with_response["usage"]["completion_tokens"]
    parts = stream_events(post(server, COMPLETIONS, {"prompt": prompt, **fields, "stream": True}))
    streamed = [part["choices"][0] for part in parts]
    assert "".join(part["text"] for part in streamed) == longer["text"]
    offsets = [offset for part in streamed for offset in part["logprobs"]["text_offset"]]
    assert offsets == longer["logprobs"]["text_offset"]


def test_reported_log_probabilities_have_a_lower_bound() -> None:
    with serving() as server:
        server.state.models["tiny"].model.get_output_embeddings().weight.data *= 1e9
        text = {"prompt": "Hi", "logprobs": 2, "echo": True, "max_tokens": 2}
        chat = {"messages": [TURN], "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
        (completion,) = post(server, COMPLETIONS, text).json["choices"]
        (response,) = post(server, CHAT, chat).json["choices"]

    (entry,), logprobs = response["logprobs"]["content"], completion["logprobs"]
    assert [top["logprob"] for top in entry["top_logprobs"]] == [0.0, MIN_LOGPROB]
    assert [set(t.values()) for t in logprobs["top_logprobs"][1:]] == [{MIN_LOGPROB, 0.0}] * 3
    assert logprobs["token_logprobs"][1:] == [MIN_LOGPROB, 0.0, 0.0]


def test_tokenize_returns_token_ids(server: LiveServer) -> None:
    served = server.state.models["tiny"]
    response = post(server, "/tokenize", {"prompt": "The sun"}).json

    ids = encode_text(served.tokenizer, "The sun")
    assert response == {"tokens": ids, "count": len(ids), "max_model_len": served.context}


def test_ratings_are_appended_counted_and_undone(server: LiveServer) -> None:
    thumb = {**PAIR, "kind": "thumb", "answers": RATED[:1], "choice": 0}
    edit = {**PAIR, "kind": "edit", "answers": RATED[:1], "choice": None, "edit": "better"}
    tie = {**PAIR, "choice": None, "tie": True, "rater": "anna"}
    ids = [post(server, "/api/ratings", body).json["id"] for body in (PAIR, thumb, edit, tie)]

    summary = get(server, "/api/ratings/summary").json
    assert (summary["path"], summary["ratings"], summary["pairs"]) == ("ratings.jsonl", 4, 2)
    for rating_id, rater, status in (ids[0], "", 200), ("", "a" * 64, 404), ("", "a" * 65, 400):
        assert post(server, "/api/ratings/undo", {"id": rating_id, "rater": rater}).status == status
    assert get(server, "/api/ratings/summary").json["ratings"] == 3
    assert server.state.ratings is not None
    lines = read_ratings(server.state.ratings.path)
    assert [line["kind"] for line in lines] == ["pair", "thumb", "edit", "pair", "undo"]
    assert [line["rater"] for line in lines] == ["", "", "", "anna", ""]
    assert (lines[0]["answers"][1]["text"], lines[0]["blind"]) == ("longer", False)


def test_unknown_paths_and_disabled_features_return_404(server: LiveServer) -> None:
    info = get(server, "/api/server").json
    assert info == {"models": [{"id": "tiny"}], "max_tokens": 5, "reward": False, "ratings": True}
    types = {"/": "text/html", "/page/app.js": "text/javascript", "/page/style.css": "text/css"}
    for path, content_type in types.items():
        assert get(server, path).headers["content-type"].startswith(content_type)
    assert get(server, "/no/path").status == 404
    rejected = get(server, COMPLETIONS)
    assert (rejected.status, rejected.headers["allow"]) == (405, "POST")
    assert post(server, "/v1/score", {"messages": DIALOGUE}).status == 404
    assert post(server, COMPLETIONS, b"[]").status == 400
    assert post(server, COMPLETIONS, b"{").status == 400
    ratings = server.state.ratings
    server.state.ratings = None
    try:
        assert post(server, "/api/ratings", PAIR).status == 404
    finally:
        server.state.ratings = ratings
