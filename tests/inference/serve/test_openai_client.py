"""The server through OpenAI's client, whose models validate every response strictly."""

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference.serve.models import ServedModel
from tests.inference.serve.serving import (
    COMPLETIONS,
    Running,
    chat,
    events,
    make_client,
    post,
    serving,
)

if TYPE_CHECKING:  # importing it takes half a second, also where tests are only collected
    from openai.types.chat import ChatCompletion, ChatCompletionChunk


def plain_copy(served: ServedModel) -> Any:
    """The model as `transformers` has it."""
    config = copy.deepcopy(served.model.config)  # else the served model's attention changes too
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(served.model.state_dict())
    return plain.eval()


MESSAGES: Any = [{"role": "user", "content": "What is 2 plus 2?"}]


def ask(server: Running, **fields: Any) -> "ChatCompletion":
    """A chat completion, held to the types of the client."""
    from openai.types.chat import ChatCompletion

    with make_client(server) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=MESSAGES, **fields
        )
    return ChatCompletion.model_validate_json(raw.text, strict=True)


def stream(server: Running, **fields: Any) -> "list[ChatCompletionChunk]":
    from openai.types.chat import ChatCompletionChunk

    answer = post(server, "/v1/chat/completions", chat(stream=True, **fields))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [
        ChatCompletionChunk.model_validate_json(json.dumps(each), strict=True)
        for each in events(answer)
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_joins_to_the_plain_response_of_the_same_seed(server: Running, count: int) -> None:
    fields = dict[str, Any](seed=7, max_tokens=24, n=count, logprobs=True, top_logprobs=2)

    plain = ask(server, **fields)
    chunks = stream(server, **fields, stream_options={"include_usage": True})

    *parts, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert plain.usage is not None
    assert last.usage.completion_tokens == plain.usage.completion_tokens
    assert last.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    assert plain.usage.completion_tokens >= count
    for choice in plain.choices:
        own = [each.choices[0] for each in parts if each.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert own[-1].finish_reason == choice.finish_reason
        assert [each.finish_reason for each in own[:-1]] == [None] * (len(own) - 1)
        joined = [
            entry.model_dump()
            for each in own
            if each.logprobs is not None
            for entry in each.logprobs.content or []
        ]
        assert choice.logprobs is not None
        whole = [entry.model_dump() for entry in choice.logprobs.content or []]
        assert [entry["token"] for entry in joined] == [entry["token"] for entry in whole]
        assert [entry["logprob"] for entry in joined] == pytest.approx(
            [entry["logprob"] for entry in whole], abs=1e-4
        )
    assert len({choice.message.content for choice in plain.choices}) == count  # separate samples


def test_temperature_0_is_the_greedy_response_of_transformers(server: Running) -> None:
    served = server.state.models["tiny"]
    prompt = torch.tensor([served.encode_text("The sun")])
    ids = prompt[0].tolist()
    plain = plain_copy(served)
    with torch.no_grad():
        expected = plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16
        )[0].tolist()[len(ids) :]

    answer = post(
        server,
        COMPLETIONS,
        {
            "model": "tiny",
            "prompt": ids,
            "temperature": 0,
            "max_tokens": 16,
            "return_token_ids": True,
        },
    )

    assert answer.json["choices"][0]["token_ids"] == expected


def test_completions_continue_texts_and_token_ids(server: Running) -> None:
    from openai.types import Completion

    served = server.state.models["tiny"]
    prompts = ["The sun", "It rains"]
    with make_client(server) as client:
        texts = client.completions.with_raw_response.create(
            model="tiny", prompt=prompts, seed=3, max_tokens=12, logprobs=2
        ).text
        ids = client.completions.create(
            model="tiny",
            prompt=[served.encode_text(prompt) for prompt in prompts],
            seed=3,
            max_tokens=12,
            logprobs=2,
        )

    found = Completion.model_validate_json(texts, strict=True)
    assert [choice.text for choice in found.choices] == [choice.text for choice in ids.choices]
    for choice in found.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.text_offset is not None
        assert choice.logprobs.text_offset[0] == 0
        assert {len(each) for each in choice.logprobs.top_logprobs or []} <= {1, 2}
    streamed = post(
        server,
        COMPLETIONS,
        {"model": "tiny", "prompt": prompts, "seed": 3, "max_tokens": 12, "stream": True},
    )
    joined = ["", ""]
    for part in events(streamed):
        joined[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert joined == [choice.text for choice in found.choices]


def test_errors_become_the_exceptions_of_the_client(server: Running) -> None:
    import openai

    with make_client(server) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10_000)
        with pytest.raises(openai.BadRequestError) as tools:
            client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                tools=[{"type": "function", "function": {"name": "f"}}],
            )

    assert missing.value.code == "model_not_found"
    assert "available: tiny" in missing.value.message
    assert wrong.value.param == "temperature"
    assert long.value.code == "context_length_exceeded"
    assert tools.value.param == "tools"


def test_a_wrong_key_is_an_authentication_error_and_a_full_queue_a_rate_limit() -> None:
    import openai

    with serving(api_key=("secret-key",), queue=1) as server:
        with make_client(server) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        right = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-key", max_retries=0)
        with right as client, server.paused():
            waits = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            with pytest.raises(openai.RateLimitError) as full:
                client.chat.completions.create(model="tiny", messages=MESSAGES)
            waits.close()

    assert int(full.value.response.headers["retry-after"]) >= 1
