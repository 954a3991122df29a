"""Tools by OpenAI's client: offered, called, answered, forced, and refused in a sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import PreTrainedTokenizerBase

from inference.serve.models import ModelPath
from tests.families import saved, tiny_causal_lm
from tests.inference.serve.serving import CHAT, COMPLETIONS, Running, chat, events, post, serving
from tests.pipeline.data.test_templates import QWEN3
from tests.pipeline.data.tokenizers import byte_level

HERMES = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for t in tools %}{{- t | tojson + '\\n' }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + m.name + ': ' + m.content + '</tool_response>' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n{"name": "' + c.function.name }}
{{- '", "arguments": ' + c.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}
{%- endif %}{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}"""

MISTRAL = """{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{{- '[TOOL_CALLS]' + m.tool_calls | tojson + eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}
{%- else %}{{- '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor -%}"""

LLAMA3 = """{%- for m in messages %}
{{- '<|im_start|>' + m.role.replace('tool', 'ipython') + '\\n' }}
{%- if loop.first and tools %}{{- 'Answer with name and parameters. ' + tools | tojson }}{% endif %}
{{- m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}"""

ODD = "{{- '' if tools else '' }}" + HERMES.replace("tool_call>", "call>")

TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama3": LLAMA3, "odd": ODD, "none": QWEN3}

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"number": NUMBER},
}
MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
SCHEMAS = {"add": ADD, "set_mood": MOOD}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "-", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION = "2 and 3?"
USER = {"role": "user", "content": QUESTION}
SAID = 'So.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
RESPONSE = SAID + "<|im_end|>"


def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    marks = ["<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|eom_id|>"]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def learn(model: Any, prompt: Any, response: Any) -> None:
    """Train on one response until it is the greedy one."""
    ids = torch.tensor([prompt + response])
    labels = torch.tensor([[-100] * len(prompt) + response])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 0.05:
            break


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model for each form; that of Hermes's has learned to call a tool."""
    places: list[ModelPath] = []
    for name, template in TEMPLATES.items():
        path: Path = tmp_path_factory.mktemp(name)
        tokenizer = tokenizer_of(template)
        tokenizer.save_pretrained(path)
        model = tiny_causal_lm(
            "llama", vocab_size=len(tokenizer), max_position_embeddings=1024, hidden_size=64
        )
        if name == "hermes":
            text = tokenizer.apply_chat_template(
                [USER],
                tools=TOOLS,  # pyright: ignore[reportArgumentType]
                tokenize=False,
                add_generation_prompt=True,
            )
            prompt, response = (tokenizer(str(each))["input_ids"] for each in (text, RESPONSE))
            learn(model, prompt, response)
        places.append(ModelPath(name, saved(model, path)))
    with serving(tuple(places), max_tokens_default=300) as running:
        yield running


def ask(server: Running, model: str, **fields: Any) -> ChatCompletion:
    fields = {"messages": [USER], "tools": TOOLS, "seed": 3, **fields}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        raw = client.chat.completions.with_raw_response.create(model=model, **fields)
    return ChatCompletion.model_validate_json(raw.text, strict=True)


def streamed(server: Running, model: str, **fields: Any) -> dict[int, tuple[str, list, str | None]]:
    """Of each choice of a stream its content, its calls and why it ended."""
    body = {"model": model, "messages": [USER], "tools": TOOLS, "seed": 3, "stream": True, **fields}
    found: dict[int, tuple[str, list, str | None]] = {}
    for each in events(post(server, CHAT, body)):
        chunk = ChatCompletionChunk.model_validate_json(json.dumps(each), strict=True)
        (choice,) = chunk.choices
        content, calls, _ = found.get(choice.index, ("", [], None))
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.index == len(calls):
                assert call.id
                assert call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        content += choice.delta.content or ""
        found[choice.index] = content, calls, choice.finish_reason
    return found


def calls_of(choice: Any) -> list[list[str]]:
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [[call.function.name, call.function.arguments] for call in calls]


def test_a_model_calls_a_tool_and_goes_on_with_its_result(server: Running) -> None:
    (choice,) = ask(server, "hermes", temperature=0).choices

    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So."
    (call,) = choice.message.tool_calls or []
    assert calls_of(choice) == [["add", '{"a": 2, "b": 3}']]
    assert streamed(server, "hermes", temperature=0) == {
        0: ("So.", [["add", '{"a": 2, "b": 3}']], "tool_calls")
    }

    message = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    messages = [USER, message, result]
    tokenizer: Any = server.state.models["hermes"].tokenizer
    body = {"model": "hermes", "messages": messages, "tools": TOOLS}
    text = tokenizer.decode(post(server, "/tokenize", body).json["tokens"])
    call_text = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    assert text.endswith(
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\nSo.{call_text}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>add: 5</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    again = ask(server, "hermes", messages=messages, max_tokens=3)
    assert again.usage is not None
    assert again.usage.prompt_tokens == len(tokenizer(text)["input_ids"])
    assert again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 200  # of the turn before


def test_tools_that_may_not_be_called_are_not_offered(server: Running) -> None:
    plain = ask(server, "hermes", tool_choice="none", max_tokens=4)
    without = ask(server, "hermes", tools=openai.NOT_GIVEN, max_tokens=4)

    assert plain.choices == without.choices
    assert plain.usage is not None
    assert plain.usage.prompt_tokens < 40


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3"])
def test_a_call_that_is_required_is_valid(server: Running, form: str) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance, of the extra guide")
    fields: dict[str, Any] = {"tool_choice": "required", "n": 3, "temperature": 1.5}
    fields["parallel_tool_calls"] = False

    choices = ask(server, form, **fields).choices

    for choice in choices:
        assert choice.finish_reason == "tool_calls", choice
        assert choice.message.content is None
        ((name, arguments),) = calls_of(choice)
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert streamed(server, form, **fields) == {
        choice.index: ("", calls_of(choice), "tool_calls") for choice in choices
    }


def test_the_function_that_is_named_is_called_and_perhaps_several_times(server: Running) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance, of the extra guide")
    choice = {"type": "function", "function": {"name": "set_mood"}}
    bias = {str(server.state.models["hermes"].tokenizer.get_vocab()["<|im_end|>"]): -3}

    found = ask(server, "hermes", tool_choice=choice, n=4, temperature=2, logit_bias=bias)

    calls = [calls_of(each) for each in found.choices if each.finish_reason == "tool_calls"]
    assert {name for each in calls for name, _ in each} == {"set_mood"}
    for each in calls:
        for _, arguments in each:
            jsonschema.validate(json.loads(arguments), MOOD)


def test_what_tools_can_not_do_is_a_sentence(server: Running) -> None:
    def refusal(path: str = CHAT, **fields: Any) -> str:
        body = {"model": "hermes", "messages": [USER], "tools": TOOLS, "max_tokens": 1, **fields}
        answer = post(server, path, body)
        assert answer.status == 400, answer.json
        return f"{answer.error['param']}: {answer.error['message']}"

    assert refusal(model="none") == (
        "tools: the chat template of none knows no tools; leave tools and their messages out, or"
        " take a model whose template does"
    )
    assert refusal(model="odd").startswith(
        "tools: the chat template of odd has calls of tools in a form that is not known; known are"
    )
    result = {"role": "tool", "tool_call_id": "x", "content": "5"}
    unknown_call = refusal(messages=[USER, result])
    assert unknown_call.endswith('messages[1]: no call before it has the id "x"')
    assert "tool_call_id belongs to the role tool, which needs it" in refusal(
        messages=[USER, {"role": "tool", "content": "5"}]
    )
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "[1]"}}
    assert "arguments must be an object in JSON" in refusal(
        messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    )
    assert "two tools are called add" in refusal(tools=[TOOLS[0], TOOLS[0]])
    named = {"type": "function", "function": {"name": "remove"}}
    assert "tool_choice names a function that is not among the tools" in refusal(tool_choice=named)
    assert "tools and regex exclude each other" in refusal(regex="a")
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    assert "parameters must be a JSON schema of the type object" in refusal(tools=[bad])
    unknown = {"type": "object", "properties": {"a": {"not": {}}}}
    bad = {"type": "function", "function": {"name": "f", "parameters": unknown}}
    assert refusal(tools=[bad], tool_choice="required").startswith("tools: tools can't guide: ")
    assert "must end in a user's turn, or in a tool's result" in refusal(
        messages=[USER, {"role": "assistant", "content": "5"}]
    )
    assert refusal(COMPLETIONS, prompt="x").startswith("tools: tools is not supported")
    assert refusal(functions=[{"name": "f"}]) == "functions: functions is not supported: give tools"
    plain = post(server, "/v1/score", {"messages": [USER, {**result}]})
    assert plain.status == 400
    assert chat()["messages"]  # the base of a request has no tools
