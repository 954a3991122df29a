"""The server with OpenAI's client, whose types validate every response strictly."""

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference.serve.models import ServedModel
from inference.text import encode_text
from tests.inference.serve.serving import (
    COMPLETIONS,
    LiveServer,
    chat,
    make_client,
    post,
    serving,
    stream_events,
)

if TYPE_CHECKING:  # importing it takes half a second
    from openai.types.chat import ChatCompletion, ChatCompletionChunk


def transformers_copy(served: ServedModel) -> Any:
    """Return the same model in `transformers`."""
    config = copy.deepcopy(served.model.config)  # otherwise, its attention changes too
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(served.model.state_dict())
    return plain.eval()


MESSAGES: Any = [{"role": "user", "content": "What is 2 plus 2?"}]


def complete(server: LiveServer, **fields: Any) -> "ChatCompletion":
    """Return a chat completion, validated by the client's types."""
    from openai.types.chat import ChatCompletion

    with make_client(server) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=MESSAGES, **fields
        )
    return ChatCompletion.model_validate_json(raw.text, strict=True)


def stream_completion(server: LiveServer, **fields: Any) -> "list[ChatCompletionChunk]":
    from openai.types.chat import ChatCompletionChunk

    response = post(server, "/v1/chat/completions", chat(stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    return [
        ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True)
        for event in stream_events(response)
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_stream_joins_to_the_response_of_the_same_seed(server: LiveServer, count: int) -> None:
    fields = dict[str, Any](seed=7, max_tokens=24, n=count, logprobs=True, top_logprobs=2)

    plain = complete(server, **fields)
    chunks = stream_completion(server, **fields, stream_options={"include_usage": True})

    *parts, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert plain.usage is not None
    assert last.usage.completion_tokens == plain.usage.completion_tokens
    assert last.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    assert plain.usage.completion_tokens >= count
    for choice in plain.choices:
        deltas = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(delta.delta.content or "" for delta in deltas) == choice.message.content
        assert deltas[-1].finish_reason == choice.finish_reason
        assert {delta.finish_reason for delta in deltas[:-1]} <= {None}
        joined = [
            entry.model_dump()
            for delta in deltas
            if delta.logprobs is not None
            for entry in delta.logprobs.content or []
        ]
        assert choice.logprobs is not None
        expected = [entry.model_dump() for entry in choice.logprobs.content or []]
        assert [entry["token"] for entry in joined] == [entry["token"] for entry in expected]
        assert [entry["logprob"] for entry in joined] == pytest.approx(
            [entry["logprob"] for entry in expected], abs=1e-4
        )
    assert len({choice.message.content for choice in plain.choices}) == count  # separate samples


def test_temperature_0_matches_greedy_transformers(server: LiveServer) -> None:
    served = server.state.models["tiny"]
    prompt = torch.tensor([encode_text(served.tokenizer, "The sun")])
    ids = prompt[0].tolist()
    plain = transformers_copy(served)
    with torch.no_grad():
        expected = plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16
        )[0].tolist()[len(ids) :]

    body = {"prompt": ids, "temperature": 0, "max_tokens": 16, "return_token_ids": True}
    response = post(server, COMPLETIONS, body)

    assert response.json["choices"][0]["token_ids"] == expected


def test_completions_accept_texts_and_token_ids(server: LiveServer) -> None:
    from openai.types import Completion

    served = server.state.models["tiny"]
    prompts = ["The sun", "It rains"]
    with make_client(server) as client:
        raw = client.completions.with_raw_response.create(
            model="tiny", prompt=prompts, seed=3, max_tokens=12, logprobs=2
        ).text
        by_ids = client.completions.create(
            model="tiny",
            prompt=[encode_text(served.tokenizer, prompt) for prompt in prompts],
            seed=3,
            max_tokens=12,
            logprobs=2,
        )

    completion = Completion.model_validate_json(raw, strict=True)
    texts = [choice.text for choice in completion.choices]
    assert texts == [choice.text for choice in by_ids.choices]
    for choice in completion.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[0] == 0
        assert {len(top) for top in choice.logprobs.top_logprobs or []} <= {1, 2, 3}
    body = {"prompt": prompts, "seed": 3, "max_tokens": 12, "stream": True}
    response = post(server, COMPLETIONS, body)
    joined = ["", ""]
    for part in stream_events(response):
        joined[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert joined == texts


def test_errors_raise_the_clients_exceptions(server: LiveServer) -> None:
    import openai

    functions: Any = [{"type": "function", "function": {"name": "f"}}]
    with make_client(server) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as invalid:
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10_000)
        with pytest.raises(openai.BadRequestError) as tools:
            client.chat.completions.create(model="tiny", messages=MESSAGES, tools=functions)

    assert missing.value.code == "model_not_found"
    assert "available models: tiny" in missing.value.message
    assert invalid.value.param == "temperature"
    assert long.value.code == "context_length_exceeded"
    assert tools.value.param == "tools"


def test_wrong_key_and_full_queue_raise_the_clients_exceptions() -> None:
    import openai

    with serving(api_key=("secret-key",), queue=1) as server:
        with make_client(server) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        authorized = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-key", max_retries=0)
        with authorized as client, server.paused():
            waiting = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            with pytest.raises(openai.RateLimitError) as full:
                client.chat.completions.create(model="tiny", messages=MESSAGES)
            waiting.close()

    assert int(full.value.response.headers["retry-after"]) >= 1
