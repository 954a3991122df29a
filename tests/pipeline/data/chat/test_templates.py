"""Chat formats that are read from the templates of tokenizers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.system.errors import DataError
from tests.pipeline.data.chat.test_chat_format import PROMPT, RESPONSE, SYSTEM, USER
from tests.pipeline.data.tokenizers import byte_level

QWEN3 = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif -%}"""
"""Like Qwen3's: the last assistant turn has a thinking block, as has the prompt if disabled."""

THINKING = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPENING' }}{% endif -%}"""
"""Like those of models that always think: the generation prompt opens the block."""

DATED = """{%- if date_string is not defined %}{%- if strftime_now is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{%- endif %}
{{- 'Today is ' + date_string + '.\\n' -}}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}"""
"""Like Llama 3.2's: inserts today's date."""

GEMMA = """{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif -%}
{%- for m in messages -%}{{- m.role + ': ' + m.content + eos_token + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif -%}"""
"""Like Gemma's: refuses system messages."""

IGNORES_SYSTEM = GEMMA.replace("{{ raise_exception('no system role') }}", "")
IGNORES_SYSTEM = IGNORES_SYSTEM.replace("in messages", "in messages if m.role != 'system'")

COUNTING = """{{- messages | length -}}
{%- for m in messages -%}{{- m.role + m.content + eos_token -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- 'assistant' }}{% endif -%}"""
"""Not prefix-stable: the text begins with the number of turns."""

STRIPS_EARLIER = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for m in messages -%}
{%- set c = m.content -%}
{%- if loop.index0 < ns.last %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.reasoning_content is defined and loop.index0 > ns.last -%}
{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif -%}
{{- c + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if closed is defined %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif -%}"""
"""Like LFM2.5's and GLM-4.5's: strips the thinking of turns before the last user turn."""

GLM = """[gMASK]<sop>{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif -%}"""
"""Like GLM's: a turn ends where the next one begins."""

THOUGHT = "<think>\nWeigh it.\n</think>\n\nBlue."
FOLLOW_UP = (USER, Message("assistant", THOUGHT), Message("user", "Sure?"))

NO_END_TOKEN = """{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif -%}"""
"""Assistant turns end with a newline, not with a special token."""


def chatml_tokenizer(template: str) -> PreTrainedTokenizerBase:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


def chatml_format(template: str) -> ChatFormat:
    return resolve_format(chatml_tokenizer(template), "tokenizer")


def make_format(template: str, *tokens: str) -> ChatFormat:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return resolve_format(tokenizer, "tokenizer")


def trained_runs(
    chat_format: ChatFormat, prompt: Sequence[Message], response: Message
) -> list[str]:
    """Return the trained runs of a row, whose token ids must begin with those of its prompt."""
    encoded = chat_format.encode(prompt, [response], origin="rows.jsonl line 1")
    prompt_ids = chat_format.encode_prompt(prompt)
    assert encoded.input_ids[: len(prompt_ids)] == prompt_ids
    runs = groupby(zip(encoded.input_ids, encoded.trained, strict=True), key=lambda pair: pair[1])
    decode = chat_format.tokenizer.decode
    return [str(decode([token for token, _ in run])) for trained, run in runs if trained]


def test_auto_selects_the_template_of_the_tokenizer() -> None:
    tokenizer = byte_level()
    assert resolve_format(tokenizer, "auto").name == "human_assistant"

    tokenizer.chat_template = GEMMA

    assert resolve_format(tokenizer, "auto").template == GEMMA


@pytest.mark.parametrize("template", [GEMMA, IGNORES_SYSTEM])
def test_unsupported_system_message_is_prepended_to_the_user_turn(template: str) -> None:
    chat_format = make_format(template)

    assert chat_format.segments((SYSTEM, USER))[0].text == (
        "user: Be kind.\n\nHi there.<|endoftext|>\nassistant: "
    )
    for messages in ((USER, SYSTEM), (USER, SYSTEM, Message("assistant", "Hello"))):
        assert chat_format.segments(messages)[0].text == (
            "user: Hi there.\n\nBe kind.<|endoftext|>\nassistant: "
        )
    with pytest.raises(DataError, match="at least one turn that is not"):
        chat_format.encode_prompt([Message("assistant", "Hi")])


def test_only_the_last_turn_is_trained_if_earlier_thinking_is_dropped() -> None:
    chat_format = chatml_format(QWEN3)

    assistant_texts = [s.text for s in chat_format.segments((*PROMPT, *RESPONSE)) if s.by_assistant]

    # "Hello you!" would be trained without the block that must precede every response.
    assert assistant_texts == ["<think>\n\n</think>\n\nFine.<|im_end|>"]
    tokenizer = chat_format.tokenizer
    assert chat_format.stop_ids[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_template_arguments_are_saved_with_the_template() -> None:
    tokenizer = chatml_tokenizer(QWEN3)
    without_thinking = resolve_format(tokenizer, "auto", {"enable_thinking": False})
    saved = without_thinking.tokenizer
    without_thinking.attach(saved)

    prompt, answer = without_thinking.segments((USER, *RESPONSE))

    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert answer.text == "Fine.<|im_end|>"
    # Passing the same arguments again, as the next step does, doesn't change the saved template.
    for arguments in ({"enable_thinking": False}, None):
        assert resolve_format(saved, "auto", arguments).template == without_thinking.template
    # A caller can still override them.
    plain = saved.apply_chat_template(
        [{"role": "user", "content": "a"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert str(plain).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [QWEN3, DATED])
def test_prompt_can_omit_the_generation_prompt(template: str) -> None:
    chat_format = chatml_format(template)
    full_ids = chat_format.encode_prompt(PROMPT)

    ids = chat_format.encode_prompt(PROMPT, generation_prompt=False)

    assert full_ids[: len(ids)] == ids
    assert chat_format.tokenizer.decode(full_ids[len(ids) :]) == "<|im_start|>assistant\n"


@pytest.mark.parametrize("opening", ["<think>", "<think>\\n"])
def test_response_closes_the_thinking_that_the_prompt_opens(opening: str) -> None:
    chat_format = chatml_format(THINKING.replace("OPENING", opening))

    prompt, _ = chat_format.segments((*PROMPT, *RESPONSE))

    assert prompt.text.rstrip().endswith("<|im_start|>assistant\n<think>")
    assert trained_runs(chat_format, PROMPT, RESPONSE[0]) == ["\n</think>\n\nFine.<|im_end|>"]


def test_tokens_do_not_depend_on_the_date() -> None:
    tokenizer = chatml_tokenizer(DATED)

    default = resolve_format(tokenizer, "auto")

    assert default.segments((USER,))[0].text.startswith("Today is 01 Jan 2026.")
    # The template saved with the model gives the same text on any date.
    default.attach(tokenizer)
    message = [{"role": "user", "content": USER.content}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert text == default.segments((USER,))[0].text


def test_turn_without_end_token_is_ended_by_eos() -> None:
    chat_format = make_format(NO_END_TOKEN)

    texts = [segment.text for segment in chat_format.segments((*PROMPT, *RESPONSE))]

    assert texts == [
        "user: Hi there.\nassistant: ",
        "Hello you!<|endoftext|>",
        "\nuser: How are you?\nassistant: ",
        "Fine.<|endoftext|>",
    ]


def test_template_that_is_not_prefix_stable_raises() -> None:
    with pytest.raises(DataError, match="renders the start of a dialogue differently when more"):
        make_format(COUNTING)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, "\n<|im_start|>user\nMore Four.<|im_end|>\n<|im_start|>assistant\n"),
        (
            THINKING.replace("OPENING", "<think>"),
            "\n<|im_start|>user\nMore Four.<|im_end|>\n<|im_start|>assistant\n<think>",
        ),
    ],
)
def test_observation_is_encoded_if_earlier_responses_are_shortened(
    template: str, expected: str
) -> None:
    chat_format = chatml_format(template)
    ids = chat_format.encode_observation(PROMPT[:2], [Message("user", "More Four.")])

    assert chat_format.tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    ("opening", "content", "target"),
    [
        ("<think>\\n", THOUGHT, "Weigh it.\n</think>\n\nBlue."),
        ("<think>", THOUGHT, "\nWeigh it.\n</think>\n\nBlue."),
        ("<think>\\n", "Weigh it.\n</think>\n\nBlue.", "Weigh it.\n</think>\n\nBlue."),
        ("<think>\\n", "Blue.", "\n</think>\n\nBlue."),
        ("", THOUGHT, THOUGHT),
        ("", "Blue.", "Blue."),
    ],
)
def test_thinking_that_the_template_strips_is_trained_as_given(
    opening: str, content: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    chat_format = chatml_format(THINKING.replace("OPENING", opening))

    for _ in range(2):
        runs = trained_runs(chat_format, (USER,), Message("assistant", content))
        assert runs == [f"{target}<|im_end|>"]

    prompt = chat_format.encode_prompt((USER,))
    assert str(chat_format.tokenizer.decode(prompt)).endswith(
        f"<|im_start|>assistant\n{opening}".replace("\\n", "\n")
    )
    warnings = [record for record in caplog.records if "rows.jsonl line 1" in record.message]
    assert len(warnings) == ("</think>" in content)  # once


def test_turn_whose_thinking_is_stripped_later_is_not_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat_format = chatml_format(STRIPS_EARLIER)
    yes = "<think>\nCheck.\n</think>\n\nYes."

    assert trained_runs(chat_format, FOLLOW_UP, Message("assistant", yes)) == [f"{yes}<|im_end|>"]
    assert any("when more turns" in record.message for record in caplog.records)
    # Without thinking, the earlier response is always rendered alike, and is trained.
    plain = (USER, Message("assistant", "Blue."), FOLLOW_UP[2])
    assert trained_runs(chat_format, plain, Message("assistant", yes)) == [
        "Blue.<|im_end|>",
        f"{yes}<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "target"),
    [
        (STRIPS_EARLIER, "<think>Weigh it.</think>Blue.<|im_end|>"),
        (THINKING.replace("OPENING", "<think>\\n"), "Weigh it.\n</think>\n\nBlue.<|im_end|>"),
        (THINKING.replace("OPENING", ""), f"{THOUGHT}<|im_end|>"),
        (DATED, "Blue.<|im_end|>"),  # not supported, with a warning
    ],
)
def test_reasoning_that_is_separate_from_the_content_is_rendered(
    template: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    chat_format = chatml_format(template)
    response = Message("assistant", "Blue.", reasoning="Weigh it.")

    assert trained_runs(chat_format, (USER,), response) == [target]
    assert ("does not support reasoning" in caplog.text) == (template == DATED)


def test_tokens_include_the_space_after_them_also_between_turns() -> None:  # as Phi 3's
    tokenizer = byte_level()
    tokenizer.chat_template = NO_END_TOKEN.replace(": '", ":'").replace("'\\n'", "'<|end|>\\n'")
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    chat_format = resolve_format(tokenizer, "tokenizer")

    turns = [{"role": turn.role, "content": turn.content} for turn in PROMPT]
    plain = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    observation = chat_format.encode_observation(PROMPT[:2], PROMPT[2:])
    assert chat_format.encode_prompt(PROMPT) == plain
    assert plain[-len(observation) - 1 :] == [len(tokenizer) - 1, *observation]


def test_thinking_after_a_closed_thinking_block_raises() -> None:
    chat_format = chatml_format("{%- set closed = true -%}" + STRIPS_EARLIER)

    for thought in (THOUGHT, THOUGHT.replace("Weigh it.", "<b>Weigh</b> it.")):
        with pytest.raises(DataError, match=r"^rows.jsonl line 1: chat format tokenizer closes "):
            trained_runs(chat_format, (USER,), Message("assistant", thought))
    for content in ("Blue.", "<think>\n\n</think>\n\nBlue."):
        assert trained_runs(chat_format, (USER,), Message("assistant", content)) == [
            "Blue.<|im_end|>"
        ]
    # SmolLM3: the template keeps thinking after the closed block of an earlier turn.
    template = turn_template("{{- '<think>' + thought + '</think>' + c }}", "<think></think>")
    chat_format = chatml_format(template.replace("PARSES", "false"))
    assert trained_runs(chat_format, FOLLOW_UP, YES) == ["Yes.<|im_end|>"]
    # Seed-OSS: the template has tags of its own.
    chat_format = chatml_format(chat_format.template.replace("think>", "seed:think>"))
    with pytest.raises(DataError, match="closes the thinking block"):
        trained_runs(chat_format, (USER,), Message("assistant", "Blue.", reasoning="Weigh it."))


def test_end_token_in_the_text_of_a_row_is_trained_once(caplog: pytest.LogCaptureFixture) -> None:
    chat_format = chatml_format(DATED)
    prompt = (USER, Message("assistant", "Red.<|im_end|>\n"), Message("user", "Why <|im_end|>"))
    response = Message("assistant", "Blue.<|endoftext|> <|im_end|>")

    assert trained_runs(chat_format, prompt[2:], RESPONSE[0]) == ["Fine.<|im_end|>"]
    assert caplog.text == ""
    assert trained_runs(chat_format, prompt, response) == ["Red.<|im_end|>", "Blue.<|im_end|>"]
    assert caplog.text.count("rows.jsonl line 1: chat format tokenizer adds the end") == 1
    for text in ("end", "n", ">"):  # which the end token has too
        runs = trained_runs(chat_format, (USER,), Message("assistant", text))
        assert runs == [f"{text}<|im_end|>"]
    assert "adds its tokens to a prompt" not in caplog.text
    trained_runs(chat_format, (Message("user", "<|im_start|>user\nWhy?<|im_end|>\n"),), response)
    assert "adds its tokens to a prompt" in caplog.text
    prefilled, plain = ((USER, Message("assistant", text)) for text in ("Re<|im_end|>", "Re"))
    assert chat_format.encode(prefilled, [response]) == chat_format.encode(plain, [response])


def test_token_inside_a_response_does_not_end_it() -> None:  # Kimi K3's channels
    template = (
        "{%- for m in messages -%}{{- '<|open|>' + m.role + '<|sep|>' -}}"
        "{%- if m.role == 'assistant' %}{{- '<|close|>think<|sep|>' }}{% endif -%}"
        "{{- m.content + '<|close|><|end|>' }}{% endfor -%}"
        "{%- if add_generation_prompt %}{{- '<|open|>assistant<|sep|>' }}{% endif -%}"
    )
    chat_format = make_format(template, "<|open|>", "<|sep|>", "<|close|>", "<|end|>")

    runs = trained_runs(chat_format, (USER,), Message("assistant", "Blue."))
    assert runs == ["<|close|>think<|sep|>Blue.<|close|><|end|>"]


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (DATED, "The colour"),
        (QWEN3, "<think>\n\n</think>\n\nThe colour"),
        (THINKING.replace("OPENING", "<think>\\n"), "\n</think>\n\nThe colour"),
    ],
)
@pytest.mark.parametrize("space", ["", " "])
def test_prompt_may_contain_the_start_of_the_response(
    template: str, opening: str, space: str
) -> None:
    chat_format = chatml_format(template)
    prompt = (USER, Message("assistant", f"The colour{space}"))
    rest = "is blue." if space else " is blue."

    assert trained_runs(chat_format, prompt, Message("assistant", rest)) == [f"{rest}<|im_end|>"]
    text = str(chat_format.tokenizer.decode(chat_format.encode_prompt(prompt)))
    assert text.endswith(f"{opening}{space}")


def test_prompt_may_contain_the_start_of_the_thinking() -> None:
    prompt = (USER, Message("assistant", "<think>\nWeigh"))
    for opening in ("<think>\\n", ""):
        chat_format = chatml_format(THINKING.replace("OPENING", opening))
        rest = " it.\n</think>\n\nBlue."

        assert trained_runs(chat_format, prompt, Message("assistant", rest)) == [
            f"{rest}<|im_end|>"
        ]
        text = str(chat_format.tokenizer.decode(chat_format.encode_prompt(prompt)))
        assert text.endswith("<|im_start|>assistant\n<think>\nWeigh")


def turn_template(turn: str, prompt: str) -> str:
    """Build a ChatML-like template with a different assistant turn and generation prompt."""
    return (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' -}}"
        "{%- set c = m.content -%}{%- set thought = m.reasoning_content | default('') -%}"
        "{%- if m.role == 'assistant' and '</think>' in c and PARSES -%}"
        "{%- set thought = c.split('</think>')[0].split('<think>')[-1].strip() -%}"
        "{%- set c = c.split('</think>')[-1].strip() %}{% endif -%}"
        f"{{%- if m.role == 'assistant' %}}{turn}{{% else %}}{{{{- c }}}}{{% endif -%}}"
        "{{- '<|im_end|>\\n' }}{% endfor -%}"
        "{%- if add_generation_prompt -%}"
        f"{{{{- '<|im_start|>assistant\\n{prompt}' }}}}{{% endif -%}}"
    )


THINKING_BLOCK = "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + c }}"


@pytest.mark.parametrize(
    ("template", "thinking", "plain"),
    [
        (  # Qwen3.5 and Nemotron 3: the last turn has a thinking block, which the prompt opens
            turn_template(THINKING_BLOCK, "<think>\\n").replace("PARSES", "true"),
            "Weigh it.\n</think>\n\nBlue.",
            "\n</think>\n\nBlue.",
        ),
        (  # GLM-4.7: a response without thinking closes the block immediately
            turn_template(
                "{{- ('<think>' + thought if thought else '') + '</think>' + c }}", "<think>"
            ).replace("PARSES", "true"),
            "Weigh it.</think>Blue.",
            "</think>Blue.",
        ),
        (  # Qwen3.8: only a separate reasoning field fills the block of a turn
            turn_template(THINKING_BLOCK, "<think>\\n").replace("PARSES", "false"),
            "Weigh it.\n</think>\n\nBlue.",
            "\n</think>\n\nBlue.",
        ),
        (  # Nemotron Nano 2: the last turn is always written into the opened block
            turn_template("{{- '<think>\\n' + c }}", "<think>\\n").replace("PARSES", "false"),
            "Weigh it.\n</think>\n\nBlue.",
            "\n</think>\n\nBlue.",
        ),
        (  # Kimi K2 Thinking: only a separate reasoning field fills the block
            turn_template("{{- '<think>' + thought + '</think>' + c }}", "").replace(
                "PARSES", "false"
            ),
            THOUGHT,
            "<think></think>Blue.",
        ),
    ],
    ids=["Qwen3.5", "GLM-4.7", "Qwen3.8", "Nemotron", "Kimi"],
)
def test_thinking_block_is_rendered_once(template: str, thinking: str, plain: str) -> None:
    chat_format = chatml_format(template)
    prompt = str(chat_format.tokenizer.decode(chat_format.encode_prompt((USER,))))
    unfinished = "<think>\nWeigh"
    empty = THOUGHT.replace("Weigh it.", "")

    for content, target in (
        (THOUGHT, thinking),
        ("Blue.", plain),
        (empty, empty if thinking == THOUGHT else plain),
        (unfinished, unfinished.removeprefix(prompt.rpartition("assistant\n")[2])),
    ):
        runs = trained_runs(chat_format, (USER,), Message("assistant", content))
        assert runs == [f"{target}<|im_end|>"]
    without_text = Message("assistant", THOUGHT.removesuffix("\n\nBlue."))
    assert str(trained_runs(chat_format, (USER,), without_text)).count("<|im_end|>") == 1


def test_thinking_kept_in_the_generation_prompt_is_trained() -> None:
    # LFM2.5-Instruct: thinking is stripped from all assistant turns but the last.
    chat_format = chatml_format(STRIPS_EARLIER.replace("m.role == 'user'", "m.role == 'assistant'"))

    runs = trained_runs(chat_format, FOLLOW_UP, Message("assistant", "Yes."))

    assert runs == [f"{THOUGHT}<|im_end|>", "Yes.<|im_end|>"]


GEMMA4 = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.thinking is defined %}{{- '<|channel>' + m.thinking + '<channel|>' }}{% endif -%}
{{- m.content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<|channel><channel|>' }}{% endif -%}"""
"""Like Gemma 4's: its prompts have an empty thinking channel, which its responses don't."""


def test_reasoning_after_a_closed_thinking_channel_raises() -> None:
    tokens = ("<|im_start|>", "<|im_end|>", "<|channel>", "<channel|>")
    chat_format = make_format(GEMMA4, *tokens)

    assert trained_runs(chat_format, (USER,), Message("assistant", "Blue.")) == ["Blue.<|im_end|>"]
    with pytest.raises(DataError, match="closes the thinking"):
        trained_runs(chat_format, (USER,), Message("assistant", "Blue.", reasoning="Weigh it."))


def tool_template(call: str, end: str, *, tools: str = "{{- tools | tojson }}") -> str:
    """Build a ChatML-like template with tool calls."""
    return (
        f"{{%- if tools %}}{tools}{{% endif -%}}{{%- for m in messages -%}}"
        "{{- '<|im_start|>' + m.role + '\\n' -}}{%- if m.tool_calls -%}"
        f"{{%- for tool_call in m.tool_calls %}}{call}{{% endfor %}}{{{{- '{end}' -}}}}"
        "{%- else %}{{- m.content + '<|im_end|>' }}{% endif %}{{- '\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}"
    )


CALL_WITH_JSON = "{{- tool_call.function.name + ' ' + tool_call.function.arguments | tojson -}}"
CALL_WITH_TEXT = "{{- tool_call.function.name + ' ' + tool_call.function.arguments -}}"
SCHEMA = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}
TOOL_CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
DIALOGUE = (
    Message("user", "Warm?", keys=json.dumps({"tools": [SCHEMA]})),
    Message("assistant", "", keys=json.dumps({"tool_calls": TOOL_CALLS})),
    Message("tool", "22 degrees"),
)
YES = Message("assistant", "Yes.")


@pytest.mark.parametrize(
    ("template", "end", "arguments"),
    [
        (tool_template(CALL_WITH_JSON, "<|im_end|>"), "<|im_end|>", {"city": "Oslo"}),
        # Harmony: a tool call ends with a different token than a response.
        (tool_template(CALL_WITH_JSON, "<|call|>"), "<|call|>", {"city": "Oslo"}),
        # Command A: the template ignores `add_generation_prompt`.
        (
            tool_template(CALL_WITH_JSON, "<|call|><|endoftext|>").replace(
                "if add_generation_prompt", "if true"
            ),
            "<|call|><|endoftext|>",
            {"city": "Oslo"},
        ),
        # DeepSeek: arguments are text, and the content next to tool calls is not null.
        (
            tool_template("{{- m.content + " + CALL_WITH_TEXT[4:], "<|im_end|>"),
            "<|im_end|>",
            '{"city": "Oslo"}',
        ),
        # Hunyuan: tool calls are rendered only in dialogues with tools.
        (
            tool_template(CALL_WITH_JSON, "<|im_end|>").replace(
                "m.tool_calls -", "tools and m.tool_calls -"
            ),
            "<|im_end|>",
            {"city": "Oslo"},
        ),
    ],
)
def test_tool_calls_are_trained_as_rendered(template: str, end: str, arguments: object) -> None:
    chat_format = make_format(template, "<|im_start|>", "<|im_end|>", "<|call|>")

    call = f'weather {{"city": "Oslo"}}{end}'
    assert trained_runs(chat_format, DIALOGUE, YES) == [call, "Yes.<|im_end|>"]
    assert trained_runs(chat_format, DIALOGUE[:1], DIALOGUE[1]) == [call]
    function = {"name": "weather", "arguments": arguments}
    rendered = chat_format.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Warm?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "22 degrees"},
        ],
        tools=[SCHEMA],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert chat_format.tokenizer.decode(chat_format.encode_prompt(DIALOGUE)) == rendered


def test_tool_call_may_end_where_its_result_begins() -> None:
    template = GLM.replace("m.content", "(m.tool_calls | tojson if m.tool_calls else m.content)")
    tokens = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|tool|>")
    chat_format = make_format("{{- tools | tojson if tools }}" + template, *tokens)

    call = json.dumps(TOOL_CALLS)
    assert trained_runs(chat_format, DIALOGUE, YES) == [f"{call}<|tool|>", "Yes.<|user|>"]
    # Apertus: no token is between a call and its result.
    template = tool_template(CALL_WITH_JSON, "").replace(
        "{{- '<|im_start|>' + m.role", "{{- '' if m.role == 'tool' else '<|im_start|>' + m.role"
    )
    chat_format = chatml_format(template)
    assert trained_runs(chat_format, DIALOGUE, YES) == [
        'weather {"city": "Oslo"}',
        "Yes.<|im_end|>",
    ]
    text = chat_format.tokenizer.decode(chat_format.encode_prompt(DIALOGUE))
    assert text == chat_format.render(DIALOGUE, generation_prompt=True)


def test_tool_call_closes_the_thinking_that_the_prompt_opens() -> None:
    template = tool_template(CALL_WITH_JSON, "<|im_end|>").replace(
        "assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"
    )
    chat_format = chatml_format(template)
    thought = replace(DIALOGUE[1], reasoning="Look.")

    call = 'weather {"city": "Oslo"}<|im_end|>'
    assert trained_runs(chat_format, DIALOGUE[:1], DIALOGUE[1]) == [f"\n</think>\n\n{call}"]
    assert trained_runs(chat_format, DIALOGUE[:1], thought) == [f"Look.\n</think>\n\n{call}"]
    # DeepSeek V3.2: the prompt has a closed block, of which a call has only the end.
    template = template.replace("<think>\\n", "<think></think>").replace(
        "{%- if m.tool_calls", "{{- '</think>' if m.tool_calls -}}{%- if m.tool_calls"
    )
    assert trained_runs(chatml_format(template), DIALOGUE[:1], DIALOGUE[1]) == [call]


def test_thinking_before_tool_calls_is_kept_with_the_last_response() -> None:
    # gpt-oss: once the last response follows, the thinking before its tool calls is omitted.
    analysis = (
        "{%- if m.thinking is defined and (add_generation_prompt or loop.last) -%}"
        "{{- 'analysis ' + m.thinking + '<|end|>' }}{% endif -%}{{- '' -}}"
    )
    template = tool_template(CALL_WITH_JSON, "<|call|>").replace(
        "{%- if m.tool_calls", analysis + "{%- if m.tool_calls"
    )
    chat_format = make_format(template, "<|im_start|>", "<|im_end|>", "<|call|>", "<|end|>")
    dialogue = (DIALOGUE[0], replace(DIALOGUE[1], reasoning="Look."), DIALOGUE[2])

    assert trained_runs(chat_format, dialogue, replace(YES, reasoning="So.")) == [
        'analysis Look.<|end|>weather {"city": "Oslo"}<|call|>',
        "analysis So.<|end|>Yes.<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (DATED, "ignores `tools`"),
        (tool_template(CALL_WITH_JSON, "<|im_end|>", tools=""), "ignores `tools`"),
        (
            DATED.replace("'\\n' + m.content", "'\\n' + (m.content or tools | tojson)"),
            "does not support",
        ),
    ],
)
def test_template_without_tool_support_raises(template: str, message: str) -> None:
    if message == "does not support":
        template = "{{- tools | tojson if tools }}" + template
    chat_format = chatml_format(template)

    with pytest.raises(DataError, match=rf"^rows.jsonl line 1: .*{message}"):
        trained_runs(chat_format, DIALOGUE, YES)


def test_text_omitted_next_to_tool_calls_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    chat_format = chatml_format(tool_template(CALL_WITH_JSON, "<|im_end|>"))
    text_and_call = replace(DIALOGUE[1], content="Let me look.")

    assert trained_runs(chat_format, DIALOGUE[:1], text_and_call) == [
        'weather {"city": "Oslo"}<|im_end|>'
    ]
    assert "next to tool calls" in caplog.text
    # DeepSeek's: the tool calls are omitted instead; gpt-oss's: all calls but the first; Nemotron
    # Nano 2's: the text is a turn of its own. These are errors.
    response = replace(text_and_call, keys=json.dumps({"tool_calls": TOOL_CALLS * 2}))
    for old, new, message in (
        ("if m.tool_calls", "if m.tool_calls and not m.content", "omits tool calls"),
        ("in m.tool_calls", "in m.tool_calls[:1]", "omits tool calls"),
        (
            "- if m",
            "- if m.tool_calls %}{{- m.content + '<|im_end|>' }}{% endif %}{% if m",
            "two turns",
        ),
    ):
        template = tool_template(CALL_WITH_JSON, "<|im_end|>").replace(old, new)
        with pytest.raises(DataError, match=message):
            trained_runs(chatml_format(template), DIALOGUE[:1], response)
