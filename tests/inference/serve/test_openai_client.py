"""What OpenAI's own client makes of the server: its models validate every response strictly."""

import asyncio
import copy
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import AutoModelForCausalLM

from inference.engine.requests import sample_key
from inference.engine.sampling import Sampler
from inference.generation import generate_each
from inference.serve.served import ServedModel
from inference.streaming import plain_text
from pipeline.data.examples import Message
from tests.inference.serve.serving import COMPLETIONS, Running, chat, events, post, serving


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def plain_copy(served: ServedModel) -> Any:
    """The model as `transformers` has it."""
    config = copy.deepcopy(served.model.config)  # else the served model's attention changes too
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(served.model.state_dict())
    return plain.eval()


MESSAGES: Any = [{"role": "user", "content": "What is 2 plus 2?"}]


def ask(server: Running, **fields: Any) -> ChatCompletion:
    """A chat completion, held to the types of the client."""
    with client_of(server) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=MESSAGES, **fields
        )
    return ChatCompletion.model_validate_json(raw.text, strict=True)


def stream(server: Running, **fields: Any) -> list[ChatCompletionChunk]:
    answer = post(server, "/v1/chat/completions", chat(stream=True, **fields))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [
        ChatCompletionChunk.model_validate_json(json.dumps(each), strict=True)
        for each in events(answer)
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_a_stream_joins_to_the_plain_response_of_the_same_seed(server: Running, count: int) -> None:
    fields: dict[str, Any] = {
        "seed": 7,
        "max_tokens": 24,
        "n": count,
        "logprobs": True,
        "top_logprobs": 2,
    }

    plain = ask(server, **fields)
    chunks = stream(server, **fields, stream_options={"include_usage": True})

    *parts, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert plain.usage is not None
    assert last.usage.completion_tokens == plain.usage.completion_tokens
    assert last.usage.prompt_tokens == plain.usage.prompt_tokens
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
    texts = {choice.message.content for choice in plain.choices}
    assert len(texts) == count  # each is a sample of its own


def test_a_response_is_that_of_the_file_of_prompts_with_the_same_seed(server: Running) -> None:
    served = server.state.models["tiny"]
    prompt = served.chat.encode_prompt([Message("user", "What is 2 plus 2?")])
    sampler = Sampler(temperature=0.7, top_p=0.9, seed=5, stop_ids=served.chat.stop_ids)
    keys = [sample_key(0, sample) for sample in range(2)]
    expected = {
        each.index: each.response.ids
        for each in generate_each(
            served.model, [prompt] * 2, sampler, max_new_tokens=20, keys=keys, batch_size=2
        )
    }

    found = ask(
        server,
        temperature=0.7,
        top_p=0.9,
        seed=5,
        n=2,
        max_tokens=20,
        extra_body={"return_token_ids": True},
    )

    ids = [choice.model_extra["token_ids"] for choice in found.choices if choice.model_extra]
    assert ids == [expected[0], expected[1]]


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


def test_64_prompts_at_once_have_the_responses_that_each_has_alone(server: Running) -> None:
    async def answer(client: openai.AsyncOpenAI, number: int) -> list[str | None]:
        fields: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"What is {number} plus {number * 7 % 11}?"}],
            "seed": number,
            "max_tokens": 6 + number % 5,
            "n": 3 if number % 8 == 0 else 1,
        }
        if number % 3:
            whole = await client.chat.completions.create(**fields)
            return [choice.message.content for choice in whole.choices]
        texts = [""] * fields["n"]
        async for chunk in await client.chat.completions.create(**fields, stream=True):
            for part in chunk.choices:
                texts[part.index] += part.delta.content or ""
        return [*texts]

    async def all_at_once(numbers: Sequence[int]) -> list[list[str | None]]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(answer(client, number) for number in numbers))

    together = asyncio.run(all_at_once(range(64)))

    alone = [asyncio.run(all_at_once([number]))[0] for number in range(0, 64, 5)]
    assert together[::5] == alone


def test_completions_continue_texts_and_token_ids(server: Running) -> None:
    served = server.state.models["tiny"]
    prompts = ["The sun", "It rains"]
    with client_of(server) as client:
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


def test_an_echo_scores_the_prompt_as_the_model_itself_does(server: Running) -> None:
    served = server.state.models["tiny"]
    ids = served.encode_text("The sun is hot")
    body = {"model": "tiny", "prompt": "The sun is hot", "echo": True, "max_tokens": 0}

    choice = post(server, COMPLETIONS, {**body, "logprobs": 3}).json["choices"][0]

    plain = plain_copy(served)
    with torch.no_grad():
        rows = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [rows[at, token].item() for at, token in enumerate(ids[1:])]
    assert choice["text"] == "The sun is hot"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    offsets = choice["logprobs"]["text_offset"]
    assert [choice["text"][place:] for place in offsets[1:]] == [
        choice["text"][len(plain_text(served.tokenizer, ids[:count])) :]
        for count in range(1, len(ids))
    ]


def test_errors_become_the_exceptions_of_the_client(server: Running) -> None:
    with client_of(server) as client:
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
    assert "there are tiny" in missing.value.message
    assert wrong.value.param == "temperature"
    assert long.value.code == "context_length_exceeded"
    assert tools.value.param == "tools"


UNSET: dict[str, Any] = dict.fromkeys(
    ("tools", "tool_choice", "response_format", "seed", "stop", "user", "logit_bias", "logprobs")
)
SHAPES: dict[str, dict[str, Any]] = {
    "every field, most of them null": {
        **chat(max_tokens=2, stream=False, top_p=1, presence_penalty=0, frequency_penalty=0),
        **UNSET,
        "parallel_tool_calls": None,
    },
    "a message in parts": {
        **chat(max_completion_tokens=2),
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    },
    "names, and an earlier response as a client's object": {
        **chat(max_tokens=2),
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hi", "name": "anna"},
            {"role": "assistant", "content": "Yes", "tool_calls": None, "refusal": None},
            {"role": "user", "content": "Go"},
        ],
    },
    "a completion with the defaults of old clients": {
        "model": "tiny",
        "prompt": ["Hi"],
        "max_tokens": 2,
        "n": 1,
        "best_of": 1,
        "echo": False,
        "temperature": 0.7,
        "logprobs": None,
        "suffix": None,
        "top_p": 1.0,
    },
}
"""Bodies as other clients send them."""


def test_a_wrong_key_is_an_authentication_error_and_a_full_queue_a_rate_limit() -> None:
    with serving(api_key=("secret-key",), queue=1) as server:
        with client_of(server) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        right = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret-key", max_retries=0)
        with right as client, server.paused():
            waits = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            with pytest.raises(openai.RateLimitError) as full:
                client.chat.completions.create(model="tiny", messages=MESSAGES)
            waits.close()

    assert int(full.value.response.headers["retry-after"]) >= 1


def test_penalties_biases_and_lengths_reach_the_sampler(server: Running) -> None:
    def ids(**fields: Any) -> list[int]:
        extra = {"return_token_ids": True}
        choice = ask(server, seed=1, max_tokens=8, extra_body=extra | fields).choices[0]
        assert choice.model_extra is not None
        return choice.model_extra["token_ids"]

    assert ids(logit_bias={"70": 100}) == [70] * 8
    assert len(set(ids(logit_bias={"70": 60, "71": 60, "72": 60}, frequency_penalty=2.0))) == 3
    stop = server.state.models["tiny"].chat.stop_ids[0]
    assert ids(logit_bias={str(stop): 100}) == [stop]
    assert len(ids(logit_bias={str(stop): 100}, min_tokens=3)) == 4


def test_a_stop_string_ends_a_response_before_it(server: Running) -> None:
    whole = ask(server, seed=2, max_tokens=40).choices[0].message.content or ""
    stop = whole[len(whole) // 2 :][:3]

    cut = ask(server, seed=2, max_tokens=40, stop=["never there", stop])
    streamed = stream(server, seed=2, max_tokens=40, stop=["never there", stop])

    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    text = "".join(each.choices[0].delta.content or "" for each in streamed)
    assert text == whole[: whole.index(stop)]
    assert cut.usage is not None
    assert cut.usage.completion_tokens < 40


def test_an_unfinished_message_of_the_assistant_is_continued(server: Running) -> None:
    served = server.state.models["tiny"]
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    before = [Message("user", MESSAGES[0]["content"])]
    expected = served.chat.encode(before, [Message("assistant", "It is")]).input_ids[:-1]

    tokens = post(server, "/tokenize", {"messages": messages}).json["tokens"]
    answer = post(
        server,
        "/v1/chat/completions",
        {"messages": messages, "continue_final_message": True, "seed": 1, "max_tokens": 4},
    )
    refused = post(server, "/v1/chat/completions", {"messages": messages})

    assert tokens == expected
    assert answer.json["usage"]["prompt_tokens"] == len(expected)
    assert refused.status == 400
    assert "continue_final_message" in refused.error["message"]
