"""Responses within a JSON schema or a regular expression, which llguidance keeps them in."""

import json
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from inference.serve.errors import ApiError
from inference.serve.guides import GuideError, Guides, RowGuide
from inference.serve.response_format import Grammar, ResponseFormat
from inference.serve.text import ResponseText
from inference.serve.token_bytes import TokenBytes
from tests.inference.serve.serving import (
    CHAT,
    COMPLETIONS,
    Answer,
    Running,
    chat,
    events,
    post,
    request_bytes,
    send,
)
from tests.pipeline.data.tokenizers import KINDS, byte_level, metaspace

pytest.importorskip("llguidance", reason="needs llguidance, of the extra guide")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large", None]},
        "parts": {
            "type": "array",
            "maxItems": 2,
            "items": {"type": "integer", "minimum": -9, "maximum": 99},
        },
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
REGEX = r"(é|[a-f]{2,4})(, [0-9]+\.[0-9]{2}){1,3}!"


def schema(content: object = SCHEMA) -> dict[str, Any]:
    """The value of response_format."""
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": content}}


def contents(answer: Answer, finish: str = "stop") -> list[str]:
    """The texts of a response whose rows all ended so."""
    assert answer.status == 200, answer.json
    choices = answer.json["choices"]
    assert {each["finish_reason"] for each in choices} == {finish}
    return [each["message"]["content"] for each in choices]


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0, "top_p": 0.9}, {"top_k": 3}])
def test_what_a_schema_guides_is_valid(server: Running, settings: dict[str, Any]) -> None:
    """The model's weights are noise: nothing of the form comes from it."""
    answer = post(
        server, CHAT, chat(seed=1, n=8, max_tokens=200, response_format=schema(), **settings)
    )

    texts = contents(answer)
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


def test_a_json_object_is_one_of_any_members(server: Running) -> None:
    body = chat(seed=3, n=8, max_tokens=200, response_format={"type": "json_object"})
    answer = post(server, CHAT, body)

    ended = [each for each in answer.json["choices"] if each["finish_reason"] == "stop"]
    assert ended
    for each in ended:
        assert isinstance(json.loads(each["message"]["content"]), dict)


def test_a_regex_matches_all_of_the_response(server: Running) -> None:
    plain = post(server, CHAT, chat(seed=2, n=8, max_tokens=120, regex=REGEX))
    greedy = post(server, CHAT, chat(temperature=0, max_tokens=120, regex="[a-z]{5}"))
    text = post(
        server, COMPLETIONS, {"prompt": "It is", "seed": 4, "max_tokens": 9, "regex": " (4|four)"}
    )

    for each in contents(plain):
        assert re.fullmatch(REGEX, each)
    assert re.fullmatch("[a-z]{5}", contents(greedy)[0])
    assert text.json["choices"][0]["text"] in (" 4", " four")


def test_at_its_end_a_guide_lets_the_turn_end_alone(server: Running) -> None:
    (stop,) = server.state.models["tiny"].chat.stop_ids

    answer = post(server, CHAT, chat(seed=5, regex="ab", max_tokens=9, return_token_ids=True))
    short = post(server, CHAT, chat(seed=5, regex="a{30}", max_tokens=3))

    (choice,) = answer.json["choices"]
    assert choice["message"]["content"] == "ab"
    assert choice["token_ids"].count(stop) == 1
    assert choice["token_ids"][-1] == stop
    assert answer.json["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert re.fullmatch("a{3,29}", contents(short, "length")[0])


def test_log_probabilities_are_those_of_the_free_policy(server: Running) -> None:
    """The likeliest tokens are those without a guide, which forbids most of them."""
    wanted = {"seed": 1, "max_tokens": 2, "logprobs": True, "top_logprobs": 20}
    free = post(server, CHAT, chat(**wanted)).json["choices"][0]["logprobs"]["content"]
    guided = post(server, CHAT, chat(regex="[0-9]{9}", **wanted)).json["choices"][0]["logprobs"]

    first = guided["content"][0]
    assert first["token"].isdigit()
    assert first["top_logprobs"] == free[0]["top_logprobs"]
    assert first["logprob"] < 0


@pytest.mark.parametrize("count", [1, 3])
def test_a_guided_stream_joins_to_the_plain_response(server: Running, count: int) -> None:
    body = chat(seed=7, n=count, max_tokens=200, response_format=schema())

    plain = contents(post(server, CHAT, body))
    chunks = events(post(server, CHAT, {**body, "stream": True}))

    for row, text in enumerate(plain):
        own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == row]
        assert "".join(each["delta"].get("content") or "" for each in own) == text


@pytest.mark.jobs
def test_guided_and_free_responses_are_those_that_each_has_alone(server: Running) -> None:
    forms: list[dict[str, Any]] = [
        {},
        {"response_format": schema()},
        {"regex": REGEX},
        {"top_p": 0.8},
        {"regex": REGEX, "top_p": 0.8},
        {"temperature": 0},
    ]
    bodies = [
        chat(
            f"What is {row} plus 2?", seed=row, max_tokens=60, logprobs=True, n=1 + row % 2, **form
        )
        for row, form in enumerate(forms * 2)
    ]

    alone = [post(server, CHAT, body).json["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        among = list(pool.map(lambda body: post(server, CHAT, body).json["choices"], bodies))

    assert among == alone


LARGE = {
    "allOf": [
        {"anyOf": [{"properties": {f"{row}{at}": {"type": "integer"}}} for at in range(6)]}
        for row in range(8)
    ]
}
"""Written out it is 6 to the power of 8 schemas."""
PATTERN = r"( ?(the|hello|there|a|e)){3,9}\.?"


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_any_choice_among_the_allowed_tokens_is_a_text_that_matches(
    make: Callable[[], PreTrainedTokenizerBase], *, begins: bool
) -> None:
    """Also where decoding drops the space of a first word."""
    tokenizer = make()
    bytes_of = TokenBytes(tokenizer)
    stop: Any = tokenizer.eos_token_id
    guides = Guides("tiny", bytes_of, vocabulary=len(tokenizer) + 3, stop_ids=[stop])
    compiled = guides.compile(Grammar("regex", PATTERN, "regex"), begins=begins)
    chance = random.Random(0)

    texts = set()
    for _ in range(40):
        guide, ids = compiled.guide(), []
        while stop not in ids:
            ids.append(chance.choice(guide(ids).nonzero()[0].tolist()))
        text = ResponseText(bytes_of, begins=begins)
        texts.add("".join([*(text.add(token) for token in ids[:-1]), text.finish()]))

    assert all(re.fullmatch(PATTERN, text) for text in texts)
    assert len(texts) > 20


def test_what_a_tokenizer_would_normalize_is_written_as_the_grammar_has_it() -> None:
    tokenizer = byte_level()
    backend: Any = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.NFC()
    bytes_of = TokenBytes(tokenizer)
    guides = Guides("tiny", bytes_of, vocabulary=len(tokenizer), stop_ids=[0])
    guide, ids = guides.compile(Grammar("regex", "cafe\u0301!", "regex"), begins=True).guide(), []

    while 0 not in ids:
        ids.append(int(guide(ids).argmax()))

    assert b"".join(map(bytes_of.of, ids)).decode() == "cafe\u0301!"


def test_a_response_that_can_not_begin_with_a_space_is_not_asked_to() -> None:
    bytes_of = TokenBytes(metaspace())
    guides = Guides("tiny", bytes_of, vocabulary=len(bytes_of.tokenizer), stop_ids=[2])
    grammar = Grammar("regex", " a", "regex")

    with pytest.raises(ApiError, match="regex can't guide: no token goes on with it"):
        guides.compile(grammar, begins=True)

    assert bytes_of.of(int(guides.compile(grammar, begins=False).guide()([]).argmax())) == b" a"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"regex": "("}, "regex can't guide: unclosed group"),
        ({"regex": "(?=a)b"}, "regex can't guide: look-around"),
        ({"regex": r"[^\s\S]"}, "regex can't guide: "),
        ({"regex": "a" * 8193}, "regex: string should have at most 8192 characters"),
        ({"regex": "(a{1000}){1000}"}, "regex can't guide: lexer error: too many expressions"),
        ({"regex": 5}, "regex: input should be a valid string"),
        ({"response_format": schema({"type": "thing"})}, "response_format can't guide: Invalid"),
        ({"response_format": schema({"not": {}})}, "response_format can't guide: Unimplemented"),
        (
            {"response_format": schema({"$ref": "https://example.com/a.json"})},
            "response_format can't guide: Resource",
        ),
        ({"response_format": schema(LARGE)}, "response_format can't guide: schema too large"),
        (
            {"response_format": schema({"description": "a" * 2**16})},
            "response_format: a schema has at most 65536 characters",
        ),
        (
            {"response_format": schema({"type": "integer", "multipleOf": 999983})},
            "response_format: the least common multiple of all multipleOf is at most 10000",
        ),
        (
            {"response_format": schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]})},
            "response_format: the least common multiple of all multipleOf is at most 10000",
        ),
        (
            {"response_format": schema({"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 1e-30}]})},
            "response_format: the least common multiple of all multipleOf is at most 10000",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: input should be 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema belongs"),
        ({"response_format": schema(), "regex": "a"}, "body: regex and response_format exclude"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens does not go with regex"),
        ({"guided_regex": "a"}, "guided_regex is not supported: give the expression in regex"),
    ],
)
def test_what_can_not_guide_is_refused_in_a_sentence(
    server: Running, fields: dict[str, Any], sentence: str
) -> None:
    refused = post(server, CHAT, chat(max_tokens=4, **fields))

    assert refused.status == 400
    assert refused.error["message"].startswith(sentence), refused.error
    assert "\n" not in refused.error["message"]


@pytest.mark.parametrize(
    "parts",
    [
        [{"multipleOf": 10_000}],
        [{"multipleOf": 1e-30}],
        [{"multipleOf": 0.25}, {"multipleOf": 5}, {"properties": {"multipleOf": {"type": "null"}}}],
        [{"multipleOf": -1}, {"multipleOf": 1e400}, {"multipleOf": True}],
    ],
)
def test_small_multiples_are_taken_and_what_is_none_is_left_to_the_guide(
    parts: list[dict[str, Any]],
) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"anyOf": parts}}}

    assert ResponseFormat.model_validate(form).json_schema is not None


def test_a_schema_that_grows_without_end_holds_nobody_up(server: Running) -> None:
    """Each level names the next one twice: 2 to the power of 40, if somebody wrote it out."""
    levels = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    bomb = {"$defs": {**levels, "a40": {"type": "object"}}, "$ref": "#/$defs/a0"}

    answer = post(server, CHAT, chat(max_tokens=2, response_format=schema(bomb)))

    assert answer.status in (200, 400)


def test_a_guide_that_fails_ends_its_response_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = RowGuide.__call__

    def fails_later(guide: RowGuide, response: list[int]) -> Any:
        if len(response) == 3:
            raise GuideError("the grammar needs too much here")
        return allowed(guide, response)

    free = chat(seed=1, max_tokens=20)
    expected = post(server, CHAT, free).json["choices"]
    monkeypatch.setattr(RowGuide, "__call__", fails_later)
    bodies = [chat(seed=2, max_tokens=20, regex="a{40}b"), free, chat(seed=3, regex="a")]

    with ThreadPoolExecutor(3) as pool:
        failed, other, ended = pool.map(lambda body: post(server, CHAT, body), bodies)

    assert failed.status == 500
    assert failed.error["message"].endswith("the server's log says why")
    assert other.json["choices"] == expected
    assert contents(ended) == ["a"]
    assert server.is_idle()


def test_without_llguidance_the_extra_is_named(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    refused = post(server, CHAT, chat(response_format={"type": "json_object"}))
    plain = post(server, CHAT, chat(max_tokens=2, response_format={"type": "text"}, regex=""))

    assert refused.status == 400
    assert refused.error["param"] == "response_format"
    assert refused.error["message"].endswith("pip install 'rlhf-pipeline[guide]'")
    assert plain.status == 200


def test_a_guide_of_what_is_scored_alone_counts_for_nothing(server: Running) -> None:
    body = {"prompt": "It is 4.", "echo": True, "max_tokens": 0, "logprobs": 0}

    plain = send(server, request_bytes(COMPLETIONS, body)).json["choices"]

    assert send(server, request_bytes(COMPLETIONS, {**body, "regex": "a"})).json["choices"] == plain
